"""The kernels of csrc/fused: what they are compiled for, and the struct that they are launched with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from moecomm.fused.schedules import BLOCK_COLUMNS, Schedule
from moecomm.fused.tensor_maps import TensorMap
from moecomm.plain_kernel import PlainKernel

THREADS = 384  # kGemmThreads
MOST_GROUPS = 512  # kMostGroups
DEPTH = 64  # kDepth
ROW_MAPS = 5  # kRowMaps
_STAGING_BYTES = 2 * 2 * 8192  # of GemmShared, besides the ring
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class GemmKernel(PlainKernel):
    """`shared`: dynamic shared memory, GemmShared of csrc/fused/gemm.cuh."""

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
    header: str = "gemm",
    function: str = "grouped_gemm",
    args: str = "GemmArgs",
    more: str = "",
    helped: bool = False,
) -> GemmKernel:
    """The grouped GEMM, or another function of such a GemmConfig (csrc/fused/config.cuh) and `more`."""
    slot = (BLOCK_COLUMNS + schedule.most_rows) * DEPTH * 2 + 16  # and two barriers
    shared = schedule.stages * slot + _STAGING_BYTES + MOST_GROUPS * 4 + 16
    config = (
        f".type = Type::{TYPES[dtype]}, .swiglu = {str(swiglu).lower()}, .apart = {str(apart).lower()}, "
        f".row_unit = {schedule.row_unit}, .most_rows = {schedule.most_rows}, .stages = {schedule.stages}, "
        f".cluster = {schedule.cluster}, .shared_bytes = {shared}, .helped = {str(helped).lower()}"
    )
    entry = f"{function}<GemmConfig{{{config}}}{more}>"
    return GemmKernel(f"fused/{header}", entry, args, THREADS, cluster=schedule.cluster, shared=shared)


class GemmArgs(ctypes.Structure):
    """GemmArgs of csrc/fused/config.cuh."""

    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap * ROW_MAPS),
        ("out", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("columns", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        # Grouping of csrc/fused/tiles.h
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
    )


@lru_cache
def multiprocessors(device: int) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
