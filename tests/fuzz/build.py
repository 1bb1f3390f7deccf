"""Builds the fuzzer of all that reads bytes of other processes."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC, PLUGIN = ROOT / "csrc", ROOT / "rma_plugin" / "src"
HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-fno-pie")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COVERED = "-fsanitize-coverage=trace-pc"
PARSERS = (*("address", "copies", "driver", "exchange", "gpu", "log", "mailbox", "mesh", "signals", "socket", "times"),)
STANDARD = ("chrono", "cstring", "deque", "memory", "stdexcept", "string", "thread", "unordered_map", "vector")
PARALLEL = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Fault:
    """An edit of a file, named from the root, that leaves a check out."""

    file: str
    old: str  # occurs there exactly once
    new: str = ""


class Fuzzer:
    """The program as it is, in objects; a fault replaces one of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._header = directory / "standard.h"
        self._header.write_text("".join(f"#include <{name}>\n" for name in STANDARD))
        self._compile(self._header, Path(f"{self._header}.gch"), "-x", "c++-header")
        sources = [PLUGIN / f"{name}.cpp" for name in PARSERS]
        sources += [CSRC / "runtime" / f"{name}.cpp" for name in ("exchange", "fd_socket")]
        # Two files have the same name.
        covered = {path: directory / f"{path.parent.name}_{path.stem}.o" for path in sources}
        plain = {path: directory / f"{path.stem}.o" for path in HERE.glob("*.cpp")}
        with ThreadPoolExecutor(PARALLEL) as pool:
            jobs = [pool.submit(self._unit, source, target) for source, target in plain.items()]
            jobs += [pool.submit(self._unit, source, target, COVERED) for source, target in covered.items()]
            for job in jobs:
                job.result()
        self._objects = covered | plain
        self.program = self._link(self._objects, directory / "fuzzer")

    def with_fault(self, fault: Fault) -> Path:
        source = ROOT / fault.file
        text = source.read_text()
        assert text.count(fault.old) == 1
        edited = self._directory / f"fault_{source.name}"
        edited.write_text(text.replace(fault.old, fault.new))
        target = edited.with_suffix(".o")
        self._unit(edited, target, COVERED, "-Wno-error", f"-I{source.parent}")
        return self._link(self._objects | {source: target}, edited.with_suffix(""))

    def _unit(self, source: Path, target: Path, *more: str) -> None:
        self._compile(source, target, *more, "-include", str(self._header))

    def _compile(self, source: Path, target: Path, *more: str) -> None:
        command = ["g++", *FLAGS, *SANITIZED, *more, f"-I{CSRC}", f"-I{PLUGIN}", "-c", str(source), "-o", str(target)]
        if more[:1] == ("-x",):
            command.remove("-c")
        subprocess.run(command, check=True)

    def _link(self, objects: dict[Path, Path], program: Path) -> Path:
        # Code at the same addresses in every run: the same edges have the same numbers.
        command = ["g++", *FLAGS, *SANITIZED, "-no-pie", *map(str, objects.values()), "-o", str(program), "-ldl"]
        subprocess.run(command, check=True)
        return program
