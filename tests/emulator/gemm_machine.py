"""Kernels of csrc/fused, compiled with g++ and run by scheduler.cpp; tensor maps as tensor_cores.h reads them."""

from __future__ import annotations

import ctypes
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moecomm.fused import tensor_maps

from . import plain_gemm
from .machine import CSRC, FLAGS, HERE, LIMIT, Launch, scheduler


class _Map(ctypes.Structure):
    """Map of tensor_cores.h: a TensorMap."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint64 * 5),
        ("rank_and_size", ctypes.c_uint64),
    )


def encode(address: int, shape: Any, dtype: torch.dtype, box: Any, strides: Any = None) -> Any:
    """In place of tensor_maps.encode."""
    _, rank, _, dims, steps, boxes, _ = tensor_maps.parameters(address, shape, dtype, box, strides)
    made = _Map(address=address, rank_and_size=rank | dtype.itemsize << 8)
    for field, values in ((made.dims, dims), (made.strides, steps), (made.box, boxes)):
        field[: len(values)] = values
    return tensor_maps.TensorMap.from_buffer_copy(made)


class Machine:
    """Compiles kernels into `directory`, each once, and runs them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        plain_gemm.write(CSRC, directory / "csrc")
        self._scheduler = scheduler()
        self.kernel = lru_cache(self._kernel)

    def run(self, kernel: Any, args: ctypes.Structure, blocks: int, seed: int) -> None:
        """One launch; AssertionError if it does not end."""
        entry = ctypes.cast(self.kernel(kernel).kernel, ctypes.c_void_p).value
        launch = Launch(entry, ctypes.addressof(args), blocks, kernel.threads, kernel.shared_bytes, -1)
        assert self._scheduler.emulator_run(ctypes.addressof(launch), 1, LIMIT, seed) == 0, "it does not end"

    def _kernel(self, kernel: Any) -> Any:
        source = self._directory / f"{len(list(self._directory.glob('*.cpp')))}.cpp"
        source.write_text(
            f'#include "tensor_cores.h"\n#include "{kernel.header}.cuh"\nusing namespace moecomm;\n'
            f'extern "C" void kernel(const void* a) {{ {kernel.entry}(*static_cast<const {kernel.args}*>(a)); }}\n'
        )
        library = source.with_suffix(".so")
        include = [f"-I{HERE}", f"-I{self._directory / 'csrc'}"]
        subprocess.run(["g++", *FLAGS, *include, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))
