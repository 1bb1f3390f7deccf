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
# Sources that the driver shares with the plugin: checks, addresses and frames, for the rank that lies.
SHARED = (
    "address",
    "crc32c",
    "driver",
    "exchange",
    "fd_socket",
    "frame",
    "gpu",
    "handshake",
    "log",
    "mailbox",
    "mesh",
    "settings",
    "sha256",
    "socket",
    "times",
)
STANDARD = (
    "algorithm",
    "atomic",
    "chrono",
    "cstring",
    "deque",
    "functional",
    "memory",
    "mutex",
    "optional",
    "stdexcept",
    "string",
    "thread",
    "unordered_map",
    "vector",
)


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


def build_driver(into: Path) -> Path:
    """For a plugin that is there."""
    sources = [path for path in HERE.glob("*.cpp") if path.stem != "fake_cuda"]
    units = compile_units([*sources, *(path for path in PLUGIN if path.stem in SHARED)], into / "plain", PLAIN)
    return link(units.values(), into / "driver", PLAIN)


def build_watched(into: Path, sanitizer: tuple[str, ...]) -> tuple[Path, Path]:
    """The driver and the plugin under a sanitizer."""
    sources = [path for path in HERE.glob("*.cpp") if path.stem != "fake_cuda"]
    units = compile_units([*sources, *PLUGIN], into / "watched", sanitizer)
    plugin = {path.stem for path in PLUGIN}
    driver = [unit for name, unit in units.items() if name not in plugin or name in SHARED]
    library = [unit for name, unit in units.items() if name in plugin]
    return link(driver, into / "driver", sanitizer), link(library, into / "libplugin.so", (*sanitizer, "-shared"))


def build_fake_cuda(into: Path) -> Path:
    """A folder with a libcuda.so.1 in it."""
    folder = into / "fake"
    folder.mkdir()
    command = ["g++", *FLAGS, *PLAIN, "-shared", str(HERE / "fake_cuda.cpp"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return folder


def link(units: Iterable[Path], target: Path, flags: tuple[str, ...]) -> Path:
    """A program, or with -shared a library."""
    subprocess.run(["g++", *flags, *map(str, units), "-o", str(target), "-pthread", "-ldl"], check=True)
    return target
