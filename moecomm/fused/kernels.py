"""The kernels of csrc/fused, and what they are compiled for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch

from moecomm import _native
from moecomm.fused.schedules import Schedule
from moecomm.jit.plain_kernel import PlainKernel

_CONSTANTS = _native.fused_constants()
THREADS, MOST_GROUPS = _CONSTANTS["gemm_threads"], _CONSTANTS["most_groups"]
SLOT_ROW_BYTES = _CONSTANTS["slot_row_bytes"]
LEAST_COUNTED, PUBLISH_THREADS = _CONSTANTS["least_counted"], _CONSTANTS["publish_threads"]
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


def gemm_config(
    dtype: torch.dtype, swiglu: bool, apart: bool, schedule: Schedule, out: torch.dtype | None = None
) -> str:
    """GemmConfig of csrc/gemm/config.cuh; `out`: of the product, if not `dtype`."""
    fields = {"swiglu": swiglu, "apart": apart, **dataclasses.asdict(schedule)}
    config = f".type = Type::{NAMES[dtype]}, .out = Type::{NAMES[out or dtype]}, "
    return f"GemmConfig{{{config}{', '.join(f'.{name} = {str(value).lower()}' for name, value in fields.items())}}}"


@lru_cache(maxsize=64)
def gemm_kernel(
    dtype: torch.dtype, swiglu: bool, apart: bool, schedule: Schedule, out: torch.dtype | None = None
) -> SharedKernel:
    """The grouped GEMM; `out`: of the product, if not `dtype`."""
    entry = f"grouped_gemm<{gemm_config(dtype, swiglu, apart, schedule, out)}>"
    shared = _native.gemm_shared_bytes(dtype == FP8, schedule.most_rows, schedule.stages)
    return SharedKernel("gemm/gemm", entry, "GemmArgs", THREADS, cluster=schedule.cluster, shared=shared)


@lru_cache
def multiprocessors(device: int) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
