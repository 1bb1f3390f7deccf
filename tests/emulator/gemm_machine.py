"""Kernels of csrc/fused, compiled with g++ and run by scheduler.cpp; tensor maps as tensor_cores.h reads them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from moecomm.fused import tensor_maps
from moecomm.gpu.structs import struct

from . import plain_gemm
from .machine import LIMIT, Launch
from .units import Units, scheduler


class _Map(ctypes.Structure):
    """Map of tensor_cores.h: a TensorMap."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint64 * 5),
        ("rank_and_size", ctypes.c_uint64),
    )


def encode(address: int, shape: Any, dtype: torch.dtype, box: Any, strides: Any = None, swizzled: bool = True) -> Any:
    """In place of tensor_maps.encode."""
    _, rank, _, dims, steps, boxes, _ = tensor_maps.parameters(address, shape, dtype, box, strides, swizzled)
    made = _Map(address=address, rank_and_size=rank | dtype.itemsize << 8 | (not swizzled) << 16)
    for field, values in ((made.dims, dims), (made.strides, steps), (made.box, boxes)):
        field[: len(values)] = values
    return struct("TensorMap").from_buffer_copy(made)


@lru_cache
def units() -> Units:
    """Once a process."""
    return Units(plain_gemm.write, "tensor_cores.h")


@lru_cache
def compiled(kernel: Any) -> ctypes.CDLL:
    """A library whose `kernel` it is."""
    return units().library(
        f'#include "tensor_cores.h"\n#include "{kernel.header}.cuh"\nusing namespace moecomm;\n'
        f'extern "C" void kernel(const void* a) {{ {kernel.entry}(*static_cast<const {kernel.args}*>(a)); }}\n'
    )


def run(kernel: Any, args: ctypes.Structure, blocks: int, seed: int) -> None:
    """One launch; AssertionError if it does not end."""
    entry = ctypes.cast(compiled(kernel).kernel, ctypes.c_void_p).value
    launch = Launch(entry, ctypes.addressof(args), blocks, kernel.threads, kernel.shared_bytes, -1)
    assert scheduler().emulator_run(ctypes.addressof(launch), 1, LIMIT, seed) == 0, "it does not end"
