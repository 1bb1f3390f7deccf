"""The one launch of a fused layer: rows are fetched, and sent back, while both GEMMs are under way.

csrc/README.md, "The fused layer", says how.  There was a form in two launches, a GEMM each: it was faster than this one
by more than noise (2 %) in three rows of measured layers, 16 and 4096 tokens of Mixtral, where the unfused layer was
faster than both (bench/results/layers-h200-2.json, moe-mixtral-8x7b-h200-2.json, moe-mixtral-8x7b-h200-4.json).
"""

from __future__ import annotations

import torch

from moecomm import _native
from moecomm.fused import gemm
from moecomm.fused.kernels import FP8, LEAST_COUNTED, NAMES, THREADS, SharedKernel, gemm_config
from moecomm.fused.operands import Operands
from moecomm.fused.publish import row_config
from moecomm.fused.schedules import Schedule
from moecomm.fused.structs import ExpertLayerArgs, GemmArgs, LayerArgs

_MORE_COUNTED, _FEW_ROWS = 128, 4096  # where there are more rows than the second
FETCHERS = 16  # blocks that fetch: with fewer, short rows do not come in time (measured on 4 H200s)
# Tiles of the first GEMM, for every cluster of the launch, that are taken between the last that makes a band of rows
# and the first that multiplies it: with two, one that each has begun and one that it has before it.
LAG = 2
_LONG_STEP, _SHORT_STEP_ROWS, _LONG_ROW = 64, 1024, 2048
_TOGETHER = 2  # rows of a block that all fetch, at most
_MORE_WANTED = 16  # rows that the first experts may have more than others


def rows_per_counter(rows: int) -> int:
    """Rows of a counter, of so many in all: few, since tiles wait for whole counters, unless there are many counters,
    which are looked at one after the other.
    """
    return LEAST_COUNTED if rows <= _FEW_ROWS else _MORE_COUNTED


def layer_kernel(
    dtype: torch.dtype,
    apart: bool,
    schedule: Schedule,
    hidden: int,
    out: torch.dtype | None = None,
    counted: int = LEAST_COUNTED,
) -> SharedKernel:
    """The launch; `dtype`: of rows as they travel, and of what the first GEMM makes of them; `out`: of what is sent, if
    not `dtype`.
    """
    first = gemm_config(dtype, True, apart, schedule)
    entry = f"expert_layer<{first}, {row_config(dtype, hidden, counted)}, Type::{NAMES[out or dtype]}>"
    shared = _native.expert_layer_shared_bytes(dtype == FP8, schedule.most_rows, schedule.stages)
    return SharedKernel(
        "fused/expert_layer", entry, "ExpertLayerArgs", THREADS, cluster=schedule.cluster, shared=shared
    )


def layer_args(
    layer: LayerArgs,
    given: Operands,
    then: Operands,
    apart: bool,
    schedule: Schedule,
    rows: int,
    counted: int,
    clusters: int,
) -> ExpertLayerArgs:
    """Arguments of the launch; `rows`: of an expert; `clusters`: of the launch."""
    first = gemm.arguments(given, apart, then.x.data_ptr(), then.x_scales, schedule)
    blocks, few = clusters * schedule.cluster, counted == LEAST_COUNTED
    return ExpertLayerArgs(
        first=first,
        second=gemm.arguments(then, False, 0, None, schedule),
        layer=layer,
        fetchers=min(FETCHERS, blocks),
        # Of many rows those that fetch begin at once.
        together=min(rows_at_once(rows, first, clusters), _TOGETHER * blocks) if few else 0,
        lag=LAG * clusters,
        rotation_step=rotation_step(schedule, then.x.shape[1] * then.x.itemsize),
    )


def rotation_step(schedule: Schedule, row_bytes: int) -> int:
    """Row tiles of either GEMM that are made before the other goes on; `row_bytes`: of a row between the two.

    With few, what is made at any time is of both GEMMs, whose weights and rows have the second-level cache to share.
    With many, rows are sent while the second is on, and the links idle while the first is: where rows between the two
    are short, what is sent is much for the products that it takes, and steps are of 1024 rows.
    bench/results/at-work-*.json has both, and what lies between.
    """
    return _LONG_STEP if row_bytes > _LONG_ROW else _SHORT_STEP_ROWS // schedule.most_rows


def rows_at_once(rows: int, tiles: GemmArgs, clusters: int) -> int:
    """What the first tiles of all clusters are made of, where every expert has about so many rows: of all counters that
    they wait for.
    """
    most_rows, column_tiles = int(tiles.grouping.most_rows), int(tiles.grouping.column_tiles)
    row_tiles = min(int(tiles.grouping.band), -(-max(1, rows) // most_rows))
    wanted = -(-clusters // (row_tiles * column_tiles)) * min(rows, row_tiles * most_rows)
    return -(-(wanted + _MORE_WANTED) // LEAST_COUNTED) * LEAST_COUNTED
