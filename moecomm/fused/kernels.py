"""Kernels of csrc/gemm and csrc/fused, and the configurations that they are compiled for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch

from moecomm import _native
from moecomm.fused.schedules import Schedule
from moecomm.gpu.plain_kernel import PlainKernel

_CONSTANTS = _native.fused_constants()
THREADS, MOST_GROUPS = _CONSTANTS["gemm_threads"], _CONSTANTS["most_groups"]
SLOT_ROW_BYTES = _CONSTANTS["slot_row_bytes"]
LEAST_COUNTED, PUBLISH_THREADS = _CONSTANTS["least_counted"], _CONSTANTS["publish_threads"]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # dtypes of unquantized products
FP8 = torch.float8_e4m3fn
NAMES = {**TYPES, FP8: "e4m3"}  # enumerators of Type in C++


@dataclass(frozen=True)
class SharedKernel(PlainKernel):
    """A kernel with `shared` bytes of dynamic shared memory, for example GemmShared of csrc/gemm/gemm.cuh."""

    shared: int = 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.shared


def gemm_config(
    dtype: torch.dtype, swiglu: bool, apart: bool, schedule: Schedule, out: torch.dtype | None = None
) -> str:
    """Return a GemmConfig (csrc/gemm/config.cuh) as C++ source; `out`: dtype of the product, default `dtype`."""
    fields = {"swiglu": swiglu, "apart": apart, **dataclasses.asdict(schedule)}
    config = f".type = Type::{NAMES[dtype]}, .out = Type::{NAMES[out or dtype]}, "
    return f"GemmConfig{{{config}{', '.join(f'.{name} = {str(value).lower()}' for name, value in fields.items())}}}"


@lru_cache(maxsize=64)
def gemm_kernel(
    dtype: torch.dtype, swiglu: bool, apart: bool, schedule: Schedule, out: torch.dtype | None = None
) -> SharedKernel:
    """Return the grouped GEMM kernel; `out`: dtype of the product, default `dtype`."""
    entry = f"grouped_gemm<{gemm_config(dtype, swiglu, apart, schedule, out)}>"
    shared = _native.gemm_shared_bytes(dtype == FP8, schedule.most_rows, schedule.stages)
    return SharedKernel("gemm/gemm", entry, "GemmArgs", THREADS, cluster=schedule.cluster, shared=shared)


@lru_cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def gpu_name(device: int | None) -> str:
    """Return the name of a CUDA device, by which its tuning table is found; "cpu" for None."""
    return "cpu" if device is None else torch.cuda.get_device_name(device)
