"""Translation units of kernels, compiled with g++ and loaded beside scheduler.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
FLAGS = ("-std=c++20", "-Og", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC")


@lru_cache
def scheduler() -> ctypes.CDLL:
    """scheduler.cpp, once a process: kernels find its names, which must not be those of another one."""
    with TemporaryDirectory() as directory:
        library = Path(directory) / "scheduler.so"
        how = ("-std=c++20", "-O2", "-shared", "-fPIC")
        subprocess.run(["g++", *how, HERE / "scheduler.cpp", "-o", library], check=True)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.emulator_steps.restype = loaded.emulator_block_steps.restype = ctypes.c_uint64
    loaded.emulator_windows.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loaded.emulator_slow_link.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    loaded.emulator_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint]
    return loaded


def edited(write: Callable[[Path, Path], None], file: str, old: str, new: str) -> Callable[[Path, Path], None]:
    """Return what writes sources as `write` does, and then makes an edit, which must match one place."""

    def written(csrc: Path, into: Path) -> None:
        write(csrc, into)
        text = (into / file).read_text()
        assert text.count(old) == 1, (file, old)
        (into / file).write_text(text.replace(old, new))

    return written


class Units:
    """Units of a copy of csrc without PTX, which `write` makes; `head`: what all include first, compiled once.

    `counted`: threads count the basic blocks that they run.
    """

    def __init__(self, write: Callable[[Path, Path], None], head: str, counted: bool = False) -> None:
        scheduler()
        self._counted = ("-DMOECOMM_COUNTED", "-fsanitize-coverage=trace-pc") if counted else ()
        self._kept = TemporaryDirectory()
        self._directory = Path(self._kept.name)
        write(CSRC, self._directory / "csrc")
        # g++ looks for it where it would look for the header, directory by directory.
        self._compile("-x", "c++-header", HERE / head, "-o", self._directory / f"{head}.gch")

    def library(self, unit: str) -> ctypes.CDLL:
        """Each is compiled once."""
        source = self._directory / f"{hashlib.sha256(unit.encode()).hexdigest()[:20]}.cpp"
        library = source.with_suffix(".so")
        if not library.exists():
            source.write_text(unit)
            self._compile("-shared", source, "-o", library)
        return ctypes.CDLL(str(library))

    def _compile(self, *what: str | Path) -> None:
        include = (f"-I{self._directory}", f"-I{HERE}", f"-I{self._directory / 'csrc'}")
        subprocess.run(["g++", *FLAGS, *self._counted, *include, *what], check=True)
