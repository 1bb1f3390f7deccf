"""The kernels of csrc/fused: what they are compiled for, and the struct that they are launched with."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch

from moecomm.fused.schedules import Schedule, block_columns
from moecomm.fused.tensor_maps import TensorMap
from moecomm.jit.plain_kernel import PlainKernel

THREADS = 384  # kGemmThreads
MOST_GROUPS = 512  # kMostGroups
SLOT_ROW_BYTES = 128  # kSlotRowBytes
ROW_MAPS = 5  # kRowMaps
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # of products
FP8 = torch.float8_e4m3fn
NAMES = {**TYPES, FP8: "e4m3"}  # of Type


@dataclass(frozen=True)
class SharedKernel(PlainKernel):
    """`shared`: dynamic shared memory, such as GemmShared of csrc/gemm/gemm.cuh."""

    shared: int = 0

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.shared


@lru_cache(maxsize=64)
def gemm_kernel(
    dtype: torch.dtype,
    swiglu: bool,
    apart: bool,
    schedule: Schedule,
    header: str = "gemm/gemm",
    function: str = "grouped_gemm",
    args: str = "GemmArgs",
    more: str = "",
    helped: bool = False,
    out: torch.dtype | None = None,
    beside: int = 0,
) -> SharedKernel:
    """The grouped GEMM, or another function of such a GemmConfig (csrc/gemm/config.cuh) and `more`.

    `out`: of the product, if not `dtype`.  `beside`: bytes of shared memory that the function has besides.
    """
    scaled = dtype == FP8
    slot = (block_columns(dtype) + schedule.most_rows) * SLOT_ROW_BYTES + 16  # and two barriers
    if scaled:
        slot += 4 * (schedule.most_rows + 8)  # kWeightScales
    shared = schedule.stages * slot + 2 * 2 * (4096 if scaled else 8192) + MOST_GROUPS * 4 + 16 + beside
    fields = {
        "swiglu": swiglu,
        "apart": apart,
        **dataclasses.asdict(schedule),
        "shared_bytes": shared,
        "helped": helped,
    }
    config = f".type = Type::{NAMES[dtype]}, .out = Type::{NAMES[out or dtype]}, "
    config += ", ".join(f".{name} = {str(value).lower()}" for name, value in fields.items())
    entry = f"{function}<GemmConfig{{{config}}}{more}>"
    return SharedKernel(header, entry, args, THREADS, cluster=schedule.cluster, shared=shared)


class GemmArgs(ctypes.Structure):
    """GemmArgs of csrc/gemm/config.cuh."""

    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap * ROW_MAPS),
        ("out", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("columns", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        # Grouping of csrc/gemm/tiles.h
        ("groups", ctypes.c_int32),
        ("alignment", ctypes.c_int32),
        ("group_rows", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("column_tiles", ctypes.c_int32),
        ("band", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("most_rows", ctypes.c_int32),
        ("helpers", ctypes.c_int32),
        ("early", ctypes.c_int32),
        ("x_scales", ctypes.c_uint64),
        ("w_scales", ctypes.c_uint64),
        ("out_scales", ctypes.c_uint64),
        ("x_scale_row", ctypes.c_int64),
        ("x_scale_column", ctypes.c_int64),
        ("unused", ctypes.c_uint64 * 3),
    )


@lru_cache
def multiprocessors(device: int) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
