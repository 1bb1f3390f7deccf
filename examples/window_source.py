"""Functions over a moecomm.Window, compiled where they run: by cuda.core for a GPU, by g++ for CPU ranks."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from launched import installed_by

import moecomm

THREADS = 256


def cubin(source: str, arch: str = "sm_90a") -> Any:
    """Compile for a GPU.  Needs none."""
    with installed_by("pip install 'moecomm[cu13]'"):
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(std="c++17", arch=arch, include_path=[moecomm.include_dir()])
    return Program(source, "c++", options).compile("cubin")


def library(source: str) -> ctypes.CDLL:
    """Compile for CPU ranks."""
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "window.so"
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{moecomm.include_dir()}", "-x", "c++", "-"]
        subprocess.run([*command, "-o", str(built)], input=source, text=True, check=True)
        return ctypes.CDLL(str(built))


class Compiled:
    """A function of the source.  Calls take integers: addresses as they are, and what its parameters say."""

    def __init__(self, source: str, entry: str, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            self._function = getattr(library(source), entry)
            self._function.restype = None
        else:
            major, minor = torch.cuda.get_device_capability(device)
            self._function = cubin(source, f"sm_{major}{minor}a").get_kernel(entry)

    def __call__(self, handle: int, *numbers: int) -> None:
        """Run it: on CPUs at once, on a GPU as one block on the current stream."""
        if self._device.type == "cpu":
            self._function(ctypes.c_uint64(handle), *map(ctypes.c_uint64, numbers))
            return
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        launch(stream, LaunchConfig(grid=1, block=THREADS), self._function, handle, *numbers)
