"""Builds the mock of NCCL's proxy loop that drives the plugin, and a CUDA driver for machines without one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC, SRC = ROOT / "csrc", ROOT / "rma_plugin" / "src"
HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-g0", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{SRC}")
PLAIN = ("-O1",)
TSAN = ("-O0", "-fsanitize=thread")
ASAN = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PARALLEL = min(4, os.cpu_count() or 1)
PLUGIN = (*sorted(SRC.glob("*.cpp")), CSRC / "runtime" / "fd_socket.cpp")
# Sources that the driver shares with the plugin, for the rank that lies.
SHARED = ("address", "driver", "exchange", "fd_socket", "gpu", "log", "mailbox", "mesh", "socket", "times")
STANDARD = ("algorithm", "atomic", "chrono", "cstring", "deque", "functional", "map", "memory", "string", "thread")


def compile_units(sources: Iterable[Path], into: Path, flags: tuple[str, ...]) -> dict[str, Path]:
    """Object files by name.  Standard headers are most of the work: they are compiled once."""
    into.mkdir(parents=True)
    first = into / "standard.h"
    first.write_text("".join(f"#include <{name}>\n" for name in STANDARD))
    flags = (*FLAGS, *flags)
    subprocess.run(["g++", *flags, "-x", "c++-header", str(first), "-o", f"{first}.gch"], check=True)

    def compile_one(source: Path) -> Path:
        target = into / f"{source.stem}.o"
        command = ["g++", *flags, "-fvisibility=hidden", "-include", str(first), "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(PARALLEL) as pool:
        return {unit.stem: unit for unit in pool.map(compile_one, sources)}


def build_driver(into: Path, fake_cuda: Path, flags: tuple[str, ...] = PLAIN, *, with_plugin: bool = False) -> Path:
    """The driver; `with_plugin`: and libplugin.so beside it, where a sanitizer has to see both."""
    sources = [path for path in HERE.glob("*.cpp") if path.stem != "fake_cuda"]
    plugin = [path for path in PLUGIN if with_plugin or path.stem in SHARED]
    units = compile_units([*sources, *plugin], into / "units", flags)
    own = [unit for name, unit in units.items() if name in SHARED or name in {path.stem for path in sources}]
    if with_plugin:
        link([units[path.stem] for path in PLUGIN], into / "libplugin.so", (*flags, "-shared"))
    return link([*own, fake_cuda / "libcuda.so.1"], into / "driver", flags)


def build_fake_cuda(into: Path) -> Path:
    """A folder with a libcuda.so.1 in it."""
    library = into / "libcuda.so.1"
    flags = (*FLAGS, *PLAIN, "-shared", f"-Wl,-soname,{library.name}")
    subprocess.run(["g++", *flags, str(HERE / "fake_cuda.cpp"), "-o", str(library)], check=True)
    return into


def link(units: Iterable[Path], target: Path, flags: tuple[str, ...]) -> Path:
    """A program, or with -shared a library."""
    subprocess.run(["g++", *flags, *map(str, units), "-o", str(target), "-pthread", "-ldl"], check=True)
    return target
