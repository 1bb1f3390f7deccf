"""Builds the host executor and C++ tests in one program, without Python or torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .mutants import Mutant

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
NATIVE = Path(__file__).parent
# No contraction of a * b + c, as in the library.
FLAGS = ("-std=c++17", "-ffp-contract=off", "-pthread", "-g1", "-fno-omit-frame-pointer")
PLAIN = ("-O2",)
TSAN = ("-O1", "-fsanitize=thread")
ASAN = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STRICT = ("-Wall", "-Wextra", "-Werror")  # of a mutant nobody asks whether all of it is used
# These run while no rank does: there is nothing to watch, and most of the work.
BETWEEN_ROUNDS = ("scenario", "oracle", "compare", "explorer")
UNWATCHED = ("-O2", "-fno-sanitize=all")
PARALLEL = min(4, os.cpu_count() or 1)
STANDARD = ("algorithm", "cmath", "condition_variable", "cstring", "functional", "memory", "mutex", "thread", "vector")


class Program(NamedTuple):
    """Attributes:
    name: of the file.
    tests: units beside those of the host executor.
    replaced: units of the host executor that these stand for.
    hooks: a header that comes before all others in each unit.
    """

    name: str
    tests: list[Path]
    replaced: frozenset[str] = frozenset()
    hooks: Path | None = None


ROUND_DRIVER = Program("round_driver", sorted(NATIVE.glob("*.cpp")))
INTERLEAVINGS = Program(
    "interleavings",
    [
        *(NATIVE / f"{name}.cpp" for name in ("calls", "cluster", "compare", "oracle", "scenario")),
        *sorted((NATIVE / "interleavings").glob("*.cpp")),
    ],
    frozenset({"clock"}),
    NATIVE / "interleavings" / "hooks.h",
)


def standard_headers(into: Path, flags: Iterable[str], hooks: Path | None) -> Path:
    """Headers, which are most of the work of a unit, compiled once for all that are compiled with `flags`."""
    into.mkdir(parents=True, exist_ok=True)
    header = into / "standard.h"
    more = [] if hooks is None else [f'#include "{hooks}"\n']
    header.write_text("".join([*(f"#include <{name}>\n" for name in STANDARD), *more]))
    command = ["g++", *FLAGS, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, check=True)
    return header


def compile_units(sources: Iterable[Path], csrc: Path, into: Path, standard: Path, flags: Iterable[str]) -> list[Path]:
    """Object files of `sources`, with headers from `csrc`; beside each a list of the headers that it includes."""
    into.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = into / f"{source.stem}.o"
        # A unit that runs between rounds has other flags than the headers were compiled with: it compiles them again.
        more = (*(UNWATCHED if source.stem in BETWEEN_ROUNDS else ()), "-include", str(standard))
        command = ["g++", *FLAGS, *flags, *more, f"-I{csrc}", "-MMD", "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(compile_one, sources))


def includes(unit: Path, header: Path) -> bool:
    """Return whether this object file was made with the header, directly or through others."""
    listed = unit.with_suffix(".d").read_text().replace("\\\n", " ").split()
    return any(Path(name).resolve() == header for name in listed)


class Workshop:
    """A program as it is, in objects; a mutant replaces only those that its edit changes."""

    def __init__(self, directory: Path, flags: tuple[str, ...], program: Program = ROUND_DRIVER) -> None:
        self.directory, self.flags, self.program = directory, flags, program
        sources = sorted((CSRC / "host").rglob("*.cpp"))
        self.sources = {path.stem: path for path in sources if path.stem not in program.replaced}
        self.standard = standard_headers(directory, flags, program.hooks)
        units = [*self.sources.values(), *program.tests]
        objects = compile_units(units, CSRC, directory, self.standard, (*flags, *STRICT))
        self.objects = {path.stem: path for path in objects}
        self.intact = self._link(self.objects, directory)

    def build(self, mutant: Mutant) -> Path:
        here = self.directory / mutant.name.replace(" ", "_")
        csrc = here / "csrc"
        shutil.copytree(CSRC / "protocol", csrc / "protocol")
        shutil.copytree(CSRC / "host", csrc / "host")
        shutil.copytree(CSRC / "runtime", csrc / "runtime")
        shutil.copytree(CSRC / "window", csrc / "window")
        edited = csrc / mutant.file
        edited.write_text(edited.read_text().replace(mutant.old, mutant.new))
        header = CSRC / mutant.file
        changed = [edited.stem] if edited.suffix == ".cpp" else self._users_of(header)
        units = [csrc / self.sources[stem].relative_to(CSRC) for stem in changed]
        objects = compile_units(units, csrc, here, self.standard, self.flags)
        return self._link(self.objects | {path.stem: path for path in objects}, here)

    def _users_of(self, header: Path) -> list[str]:
        """The units of the executor.  The tests stay as they are: they know the truth."""
        return [stem for stem in self.sources if includes(self.objects[stem], header)]

    def _link(self, objects: dict[str, Path], into: Path) -> Path:
        program = into / self.program.name
        subprocess.run(["g++", *FLAGS, *self.flags, *map(str, objects.values()), "-o", str(program)], check=True)
        return program
