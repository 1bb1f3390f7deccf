"""Kernels of csrc/overlap, and the configurations that they are compiled for."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from moecomm import _native
from moecomm.fused.kernels import THREADS, SharedKernel, gemm_config
from moecomm.fused.schedules import Schedule
from moecomm.overlap.sizes import FP8, OF_FP8

_CONSTANTS = _native.overlap_constants()
MOST_RANKS, FLAGS, STATE_BYTES = (_CONSTANTS[name] for name in ("most_ranks", "flags", "state_bytes"))
SLICE_ROWS = _CONSTANTS["slice_rows"]
GEMV_ROWS, GEMV_COLUMNS, GEMV_THREADS = (_CONSTANTS[f"gemv_{name}"] for name in ("rows", "columns", "threads"))
EMBEDDING_THREADS = _CONSTANTS["embedding_threads"]
ALL_REDUCE_THREADS = _CONSTANTS["all_reduce_threads"]
PART_WORDS, PART_BYTES = _CONSTANTS["all_reduce_words"], _CONSTANTS["all_reduce_bytes"]
SENDS = ("reduce_scatter", "all_reduce", "all_to_all")  # enumerators of Send in C++
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # enumerators of Type
_BARRIERS_BYTES = 64  # of SendShared beside GemmShared


@lru_cache(maxsize=64)
def gather_kernel(dtype: torch.dtype, schedule: Schedule) -> SharedKernel:
    """Return the kernel of all_gather_matmul."""
    return _product("all_gather_matmul", "", "GatherMatmulArgs", dtype, schedule, 0)


@lru_cache(maxsize=64)
def send_kernel(dtype: torch.dtype, schedule: Schedule, send: str, ranks: int, split: int = 1) -> SharedKernel:
    """Return the kernel of a product whose tiles go to other ranks; `send`: one of SENDS.

    split: blocks of a cluster that multiply parts of the depth of a tile; schedules of it have clusters of 1.
    """
    more = f", Send::{send}, {ranks}, {split}"
    beside = _BARRIERS_BYTES
    if split > 1:
        beside += _native.split_sums_bytes(schedule.most_rows)
    kernel = _product("matmul_send", more, "SendMatmulArgs", dtype, schedule, beside)
    return replace(kernel, cluster=schedule.cluster * split)


def _product(name: str, more: str, args: str, dtype: torch.dtype, schedule: Schedule, beside: int) -> SharedKernel:
    out = OF_FP8 if dtype == FP8 else dtype
    entry = f"{name}<{gemm_config(dtype, False, False, schedule, out)}{more}>"
    shared = _native.gemm_shared_bytes(dtype == FP8, schedule.most_rows, schedule.stages) + beside
    return SharedKernel(f"overlap/{name}", entry, args, THREADS, cluster=schedule.cluster, shared=shared)


@lru_cache(maxsize=64)
def gemv_kernel(dtype: torch.dtype, rows: int, ranks: int) -> SharedKernel:
    """Return the kernel of matmul_all_reduce for at most 8 or 16 rows."""
    most = gemv_most(rows)
    entry, shared = f"gemv_all_reduce<Type::{TYPES[dtype]}, {most}, {ranks}>", _native.gemv_shared_bytes(most)
    return SharedKernel("overlap/gemv_all_reduce", entry, "GemvArgs", GEMV_THREADS, shared=shared)


def gemv_most(rows: int) -> int:
    """Return the rows that the kernel for so many is compiled for."""
    return 8 if rows <= 8 else GEMV_ROWS


@lru_cache(maxsize=64)
def all_reduce_kernel(dtype: torch.dtype, ranks: int) -> SharedKernel:
    """Return the kernel that adds up a matrix of bfloat16 or float16 that each rank has."""
    return SharedKernel(
        "overlap/all_reduce", f"all_reduce<Type::{TYPES[dtype]}, {ranks}>", "AllReduceArgs", ALL_REDUCE_THREADS
    )


@lru_cache(maxsize=64)
def embedding_kernel(dtype: torch.dtype) -> SharedKernel:
    """Return the kernel of embedding_all_to_all."""
    entry = f"embedding_all_to_all<Type::{TYPES[dtype]}>"
    return SharedKernel("overlap/embedding_all_to_all", entry, "EmbeddingArgs", EMBEDDING_THREADS)
