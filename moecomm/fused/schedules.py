"""Schedules of the grouped GEMM: tile sizes, stages and clusters, and their choice by shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from moecomm.core.integers import check_integer
from moecomm.core.validation import check_flag, check_sizes
from moecomm.errors import BadInput

BLOCK_COLUMNS = 128  # GemmConfig::block_columns of csrc/gemm/config.cuh; e4m3 has twice as many
# Row tiles of a band (csrc/gemm/tiles.h).  66 pairs of blocks on 132 multiprocessors work on 8 by 8.25 tiles of 256
# rows and 256 columns at a time, which reads as many bytes of x as of weights and so the fewest of both together.
BAND = 8


def block_columns(dtype: torch.dtype) -> int:
    """Return the rows of w that a block multiplies by."""
    return BLOCK_COLUMNS * (2 if dtype == torch.float8_e4m3fn else 1)


@dataclass(frozen=True)
class Schedule:
    """The tuning fields of GemmConfig (csrc/gemm/config.cuh).

    Any schedule of a dtype computes any shape, and all of them leave the same bits.

    Attributes:
        row_unit: tile heights are multiples of it.
        most_rows: largest tile height.
        stages: slots of the ring.
        cluster: blocks of a cluster, which share the rows of x.
        swapped: w is operand A of wgmma; False (FP8 only): x is.
    """

    row_unit: int
    most_rows: int
    stages: int
    cluster: int
    swapped: bool = True

    def __post_init__(self) -> None:
        check_sizes(row_unit=self.row_unit, most_rows=self.most_rows, stages=self.stages, cluster=self.cluster)
        check_flag("swapped", self.swapped)


# Names: most rows of a tile, x stages, c blocks of a cluster; u16: units of 16 rows, not 32.
SCHEDULES = {
    "64x8c1": Schedule(row_unit=16, most_rows=64, stages=8, cluster=1),
    "64x8c2": Schedule(row_unit=16, most_rows=64, stages=8, cluster=2),
    "128x6c1": Schedule(row_unit=16, most_rows=128, stages=6, cluster=1),
    "128x6c2": Schedule(row_unit=16, most_rows=128, stages=6, cluster=2),
    "256x4c1": Schedule(row_unit=32, most_rows=256, stages=4, cluster=1),
    "256x4c2u16": Schedule(row_unit=16, most_rows=256, stages=4, cluster=2),
}

# e4m3 keeps two accumulators, so tiles have at most 128 rows, and blocks 256 columns.  r: x is operand A, in units of
# 64 rows.
FP8_SCHEDULES = {
    "64x5c1": Schedule(row_unit=16, most_rows=64, stages=5, cluster=1),
    "64x5c2": Schedule(row_unit=16, most_rows=64, stages=5, cluster=2),
    "128x4c1": Schedule(row_unit=16, most_rows=128, stages=4, cluster=1),
    "128x4c1r": Schedule(row_unit=64, most_rows=128, stages=4, cluster=1, swapped=False),
}
FP8_BAND = 2 * BAND  # row tiles are half as high


# Rows of a tile, and the time for a row where tensor cores are the bottleneck, relative to the last schedule.
_HEIGHTS = {"64x8c1": (64, 1.45), "128x6c1": (128, 1.07), "256x4c1": (256, 1.0)}
_FP8_HEIGHTS = {"64x5c1": (64, 1.2), "128x4c1": (128, 1.0)}
_TALL = 192  # rows
_FEW_GROUPS, _FEW_WAVES = 4, 6


def _in_whole_waves(
    heights: dict[str, tuple[int, float]], rows: int, groups: int, column_tiles: int, multiprocessors: int
) -> str | None:
    """Return the schedule whose waves of tiles take the least time; a partial wave counts as a full one.

    For few groups with about the expected rows, and few tiles.  None for more, where rules of thumb do better.
    """
    if groups > _FEW_GROUPS:
        return None
    found = {}
    for name, (height, time) in heights.items():
        tiles = -(-rows // height)  # of equal height
        found[name] = -(-groups * tiles * column_tiles // multiprocessors), rows / tiles * time
    if min(waves for waves, _ in found.values()) > _FEW_WAVES:
        return None
    return min(found, key=lambda name: found[name][0] * found[name][1])


def choose_fp8(expected_rows: int, groups: int, columns: int, multiprocessors: int = 132) -> str:
    """Return the name of the FP8 schedule for `groups` groups of about `expected_rows` rows, matrices `[columns, K]`.

    Fitted to bench/results/gemm-fp8-rows-h200.json, gemm-fp8-schedules-h200.json and gemm-fp8-clusters-h200.json;
    tests/fused/test_schedules.py checks how well.  Small tiles are best while one tile holds nearly every group.  From
    254 rows on, where units of 64 rows waste little, 128x4c1r was 9 to 46 % faster than 128x4c1; with 125 to 128 rows
    it was not.  Clusters of two with tiles of 128 rows were faster in few cases, by little (docs/decisions.md), and
    do not exist.

    Raises:
        BadInput: sizes that are not positive integers.
    """
    _check_shape(expected_rows, groups, columns, 1, multiprocessors)
    column_tiles = -(-columns // (2 * BLOCK_COLUMNS))
    if expected_rows <= 40:
        return "64x5c2" if column_tiles % 2 == 0 else "64x5c1"
    if expected_rows >= _TALL:
        return "128x4c1r"
    few = _in_whole_waves(_FP8_HEIGHTS, expected_rows, groups, column_tiles, multiprocessors)
    return few or "128x4c1"


def _check_shape(expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int) -> None:
    check_integer("expected_rows", expected_rows, 0)
    check_sizes(groups=groups, columns=columns, depth=depth, multiprocessors=multiprocessors)


@lru_cache(maxsize=1024)
def schedule_of(
    dtype: torch.dtype, expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int
) -> Schedule:
    """Return the schedule of one GEMM, for x and w of `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return FP8_SCHEDULES[choose_fp8(expected_rows, groups, columns, multiprocessors)]
    return SCHEDULES[choose(expected_rows, groups, columns, depth, multiprocessors)]


def schedule_of_both(dtype: torch.dtype, expected_rows: int, intermediate: int) -> Schedule:
    """Return the schedule of both GEMMs of a fused layer, which cut rows into the same tiles (csrc/fused/lagged.h)."""
    if dtype == torch.float8_e4m3fn:
        return FP8_SCHEDULES[choose_both_fp8(expected_rows)]
    return SCHEDULES[choose_both(expected_rows, 2 * intermediate)]


def check_schedule(dtype: torch.dtype, schedule: Schedule) -> None:
    """Raise BadInput if `schedule` does not exist for x and w of `dtype`."""
    is_one = isinstance(schedule, Schedule)
    if dtype == torch.float8_e4m3fn and not (is_one and schedule in FP8_SCHEDULES.values()):
        raise BadInput("schedule", repr(schedule), "one of FP8_SCHEDULES")
    if dtype != torch.float8_e4m3fn and not (is_one and schedule.swapped):
        raise BadInput("schedule", repr(schedule), "one of SCHEDULES")


def choose_both(expected_rows: int, columns: int) -> str:
    """Return the name of the schedule of a fused layer, for groups of about `expected_rows` rows.

    Fitted to bench/results/one-launch-schedules-h200-4.json; tests/fused/test_schedules.py checks how well.  If
    possible a group is one tile: blocks take tiles from a counter, so two tiles with the same weights start at
    different times and load the weights from memory twice.  Tiles of 256 rows were 5 to 18 % faster than tiles of 128
    for groups of 128 and 256 rows.  `columns`: of the first GEMM's matrices.
    """
    if expected_rows <= 40:
        return "64x8c1"
    if expected_rows <= 96:
        return "128x6c1"
    column_tiles = -(-columns // BLOCK_COLUMNS)
    return "256x4c1" if expected_rows <= 384 or (column_tiles % 2 and column_tiles < 32) else "256x4c2u16"


def choose_both_fp8(expected_rows: int) -> str:
    """Return the name of the FP8 schedule of a fused layer, for groups of about `expected_rows` rows."""
    return "64x5c1" if expected_rows <= 40 else "128x4c1" if expected_rows <= 96 else "128x4c1r"


def choose(expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int = 132) -> str:
    """Return the name of the schedule for `groups` groups of about `expected_rows` rows, matrices `[columns, depth]`.

    Fitted to bench/results/gemm-h200.json; tests/fused/test_schedules.py checks how well, and where not.  The fit is
    measured; the reasons given in comments are inferred.  `multiprocessors`: of the GPU, by default those of an H200.

    Raises:
        BadInput: sizes that are not positive integers.
    """
    _check_shape(expected_rows, groups, columns, depth, multiprocessors)
    column_tiles = -(-columns // BLOCK_COLUMNS)
    paired = column_tiles % 2 == 0  # else a cluster of two in each row of tiles has an idle block
    waves = groups * column_tiles / multiprocessors  # with one row tile a group
    if expected_rows <= 40:
        # One tile holds nearly every group.  At 64 rows half of the groups need two tiles, which load the same weights
        # twice: 64x8c2 is a fifth slower there.
        return "64x8c2" if paired and waves > 1 else "64x8c1"
    if few := _in_whole_waves(_HEIGHTS, expected_rows, groups, column_tiles, multiprocessors):
        return few
    if expected_rows <= 192:
        if expected_rows > 96 and 1 < waves < 4:
            # Groups of about 128 rows: some are larger, and with so few tiles a second tile a group adds a wave.
            return "256x4c1"
        # Clusters of two where all tiles run at once.  Else single blocks: row tiles of a group are neighbors in the
        # order of tiles, and load the same weights at the same time.
        return "128x6c2" if waves <= 1 else "128x6c1"
    if expected_rows <= 384:
        # Groups of about 256 rows: half of them need two tiles of 256 rows, little more than half full.  With a long
        # sum (depth) the larger tile wins all the same, in units of 16 rows: it loads fewer bytes a product.
        return "256x4c2u16" if depth > 6144 else "128x6c1"
    # A cluster of two loads fewer bytes a product.  Single blocks are better
    # - where sums are short: blocks store often, and a cluster cannot load ahead of its slower half,
    # - where all columns run at once,
    # - where one cluster in 16 or fewer is half idle,
    # - with many rows, where loads are not the bottleneck.
    many = 6144 if paired else 1536
    alone = expected_rows > many or depth <= 2048 or waves <= 1 or (not paired and column_tiles < 32)
    return "256x4c1" if alone else "256x4c2u16"
