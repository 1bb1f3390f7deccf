"""Builds the round driver: the host executor and the C++ tests in one program, without Python or torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
NATIVE = Path(__file__).parent
# No contraction of a * b + c, as in the library.
FLAGS = ("-std=c++17", "-ffp-contract=off", "-pthread", "-g1")
TSAN = ("-O1", "-fsanitize=thread")
# These run while no rank does: there is nothing to watch, and most of the work.
BETWEEN_ROUNDS = dict.fromkeys(("scenario", "oracle", "compare"), ("-O2", "-fno-sanitize=thread"))
PARALLEL = min(4, os.cpu_count() or 1)


def compile_units(sources: Iterable[Path], csrc: Path, into: Path, flags: Iterable[str]) -> list[Path]:
    """Object files of `sources`, with headers from `csrc`."""
    into.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = into / f"{source.stem}.o"
        more = BETWEEN_ROUNDS.get(source.stem, ())
        subprocess.run(["g++", *FLAGS, *flags, *more, f"-I{csrc}", "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(compile_one, sources))


def link(objects: Iterable[Path], program: Path, flags: Iterable[str]) -> Path:
    subprocess.run(["g++", *FLAGS, *flags, *map(str, objects), "-o", str(program)], check=True)
    return program


def executor_sources(csrc: Path = CSRC) -> list[Path]:
    return sorted((csrc / "host").glob("*.cpp"))


def driver_sources() -> list[Path]:
    return sorted(NATIVE.glob("*.cpp"))


def build_driver(into: Path, flags: Iterable[str]) -> Path:
    objects = compile_units([*executor_sources(), *driver_sources()], CSRC, into, flags)
    return link(objects, into / "round_driver", flags)
