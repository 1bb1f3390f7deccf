"""The compute kernel of a fused layer and its arguments: one launch fetches rows, computes both GEMMs, sends results.

Fused.compute in moecomm/fused/pipeline.py launches it.  docs/maintainers/fused_kernels.md, "Fused layer", explains the
kernel.  A variant with one launch for each GEMM was faster by more than noise (2 %) only in three measured layers, 16
and 4096 tokens of Mixtral, where the unfused layer was faster than both (bench/results/layers-h200-2.json,
moe-mixtral-8x7b-h200-2.json, moe-mixtral-8x7b-h200-4.json).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from moecomm import _native
from moecomm.fused.kernels import (
    FP8,
    LEAST_COUNTED,
    NAMES,
    PLAIN,
    Epilogue,
    SharedKernel,
    gemm_config,
    row_config,
    threads,
)
from moecomm.fused.schedules import Schedule
from moecomm.gpu.structs import struct

_MORE_COUNTED, _FEW_ROWS = 128, 4096  # rows of a counter where there are more than _FEW_ROWS rows in all
FETCHERS = 16  # blocks that fetch: with fewer, short rows do not arrive in time (measured on 4 H200s)
# Tiles of the first GEMM, for each cluster of the launch, between the last tile that writes a band of rows and the
# first tile that reads it.  With two, each cluster has one tile in progress and one queued in between.
LAG = 2
_LONG_STEP, _SHORT_STEP_ROWS, _LONG_ROW = 64, 1024, 2048  # row tiles, rows, bytes; see row_tiles_per_turn
_TOGETHER = 2  # most rows a block that all blocks fetch first
_MORE_WANTED = 16  # rows that the first experts may have beyond the average
_CAST_ROWS = 4  # that a warp casts before it counts them, where there are many rows


def rows_per_counter(rows: int) -> int:
    """Return how many of `rows` fetched rows share a counter.

    Few, because tiles wait for full counters; more where there would be many counters, which are polled in sequence.
    """
    return LEAST_COUNTED if rows <= _FEW_ROWS else _MORE_COUNTED


@lru_cache(maxsize=64)
def layer_kernel(
    dtype: torch.dtype,
    apart: bool,
    schedule: Schedule,
    hidden: int,
    out: torch.dtype | None = None,
    counted: int = LEAST_COUNTED,
    epilogue: Epilogue = PLAIN,
) -> SharedKernel:
    """Return the kernel of the launch.

    Args:
        dtype: of published rows and of the first product, which with scales of channels is cast from `out`.
        apart: gate and up rows of w13 are not interleaved in memory.
        schedule: of both GEMMs.
        hidden: columns of a row.
        out: dtype of the results that are sent; default: `dtype`.
        counted: fetched rows that share a counter.
        epilogue: of both GEMMs.
    """
    whole = epilogue.channel_scales  # the first product is cast in whole rows
    first = gemm_config(dtype, True, apart, schedule, out if whole else None, epilogue)
    entry = f"expert_layer<{first}, {row_config(dtype, hidden, counted, whole)}, Type::{NAMES[out or dtype]}>"
    scaled = dtype == FP8 and not whole
    shared = _native.expert_layer_shared_bytes(scaled, schedule.most_rows, schedule.stages, schedule.packed_stages)
    about = ("fused/expert_layer", entry, "ExpertLayerArgs", threads(schedule))
    return SharedKernel(*about, cluster=schedule.cluster, shared=shared)


def layer_args(
    layer: ctypes.Structure,
    first: ctypes.Structure,
    second: ctypes.Structure,
    schedule: Schedule,
    clusters: int,
    together: int,
    row_bytes: int,
    casts: tuple[int, int, int] = (0, 0, 0),
    cast_rows: int = 0,
) -> ctypes.Structure:
    """Return the arguments of a launch of `clusters` clusters.

    `together`: rows_at_once(), `row_bytes`: see below, `casts`: addresses of cast rows and their counters, or 0.
    """
    return struct("ExpertLayerArgs")(
        first=first,
        second=second,
        layer=layer,
        fetchers=min(FETCHERS, clusters * schedule.cluster),
        together=together,
        lag=LAG * clusters,
        row_tiles_per_turn=row_tiles_per_turn(schedule, row_bytes),
        cast=casts[0],
        cast_done=casts[1],
        next_cast=casts[2],
        cast_rows=cast_rows,
    )


def cast_rows_at_once(rows: int) -> int:
    """Return how many of `rows` rows a warp casts at once: few, where few warps would have some otherwise."""
    return 1 if rows <= _FEW_ROWS else _CAST_ROWS


def row_tiles_per_turn(schedule: Schedule, row_bytes: int) -> int:
    """Return the row tiles of one GEMM that are computed before the other continues; `row_bytes`: of the first product.

    With short steps, tiles of both GEMMs run at any time, and their weights and rows share the L2 cache.  With long
    steps, results are sent during the second GEMM's steps only, and the links idle during the first one's.  Where rows
    of the first product are short, there are many bytes to send for the second GEMM's work, so steps have 1024 rows
    there, else 64 row tiles.  bench/results/at-work-*.json has these and step sizes between.
    """
    return _LONG_STEP if row_bytes > _LONG_ROW else _SHORT_STEP_ROWS // schedule.most_rows


def rows_at_once(rows: int, counted: int, tiles: ctypes.Structure, schedule: Schedule, clusters: int) -> int:
    """Return how many rows all blocks fetch first: those that the first tiles of all clusters wait for.

    With many rows none: fetching blocks begin with their own share at once.

    Args:
        rows: of each expert.
        counted: fetched rows that share a counter; the first tiles wait for full ones.
        tiles: of the first GEMM.
        schedule: of both GEMMs.
        clusters: of the launch.
    """
    if counted != LEAST_COUNTED:
        return 0
    most_rows = schedule.most_rows
    row_tiles = min(tiles.band, -(-max(1, rows) // most_rows))
    wanted = -(-clusters // (row_tiles * tiles.column_tiles)) * min(rows, row_tiles * most_rows)
    wanted = -(-(wanted + _MORE_WANTED) // LEAST_COUNTED) * LEAST_COUNTED
    return int(min(wanted, _TOGETHER * clusters * schedule.cluster))
