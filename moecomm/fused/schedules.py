"""Schedules of the grouped GEMM: tile sizes, stages and clusters, and their choice by shape.

Rules choose a schedule: those of the GPU's tuning table (moecomm/gpu/tuning). The rules for the H200 are fitted to
bench/results, and tests/fused/test_schedules.py checks how well. The fit is measured; these reasons are inferred:

- Up to 40 rows one tile holds nearly every group. At 64 rows half of the groups need two tiles, which load the same
  weights twice: 64x8c2 is a fifth slower there. In a row of an odd number of tiles a cluster of two has an idle block.
- Few groups with few tiles run in whole waves (moecomm/gpu/tuning/gemms.py).
- Up to 192 rows clusters of two are best where all tiles run at once. Else single blocks are: row tiles of a group are
  neighbors in the order of tiles, and load the same weights at the same time. From 145 rows on, and of about 128 rows
  with 1 to 4 waves, tiles have 256 rows: most groups then have one tile, not two.
- Up to 384 rows half of the groups need two tiles of 256 rows, little more than half full. With a long sum (depth) the
  larger tile wins all the same, in units of 16 rows: it loads fewer bytes a product.
- With more rows a cluster of two loads fewer bytes a product. Single blocks are better where sums are short (blocks
  store often, and a cluster cannot load ahead of its slower half), where all columns run at once, where one cluster in
  16 or fewer is half idle, and with many rows, where loads are not the bottleneck.
- FP8: from 64 rows on 128x4c1r is as fast as 128x4c1 or faster, in a dynamic order also where half of the groups need
  a second tile. Clusters of two with tiles of 128 rows were faster in few cases, by little
  (docs/maintainers/decisions.md), and do not exist.
- A dynamic order (csrc/gemm/tile_counter.cuh) pays where many tiles have different heights: blocks that read the same
  weights stay together. The launch that sets its counter to 0 takes 2 us, so it is for several waves of tiles.
- Fused layers: if possible a group is one tile. Tiles of 256 rows were 5 to 18 % faster than tiles of 128 for groups
  of 128 and 256 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moecomm.base.validation import MOST_SIZE, check_flag, check_integer, check_sizes
from moecomm.errors import BadInput
from moecomm.gpu import tuning
from moecomm.gpu.tuning.gemms import Rule, Shape, first_match

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
        blocks_per_sm: resident blocks of a multiprocessor; 2 with MXFP4 weights only.
        dynamic: clusters take their tiles from a counter, not every n-th; of a grouped GEMM alone, since the tiles of
            fused layers have an order of their own.
        packed_stages: with packed MXFP4 weights beside FP8 rows only, slots of the ring of these weights.
    """

    row_unit: int
    most_rows: int
    stages: int
    cluster: int
    swapped: bool = True
    blocks_per_sm: int = 1
    dynamic: bool = False
    packed_stages: int = 0

    def __post_init__(self) -> None:
        check_sizes(row_unit=self.row_unit, most_rows=self.most_rows, stages=self.stages, cluster=self.cluster)
        check_sizes(blocks_per_sm=self.blocks_per_sm)
        check_flag("swapped", self.swapped)
        check_flag("dynamic", self.dynamic)
        check_integer("packed_stages", self.packed_stages, 0, MOST_SIZE)
        if self.dynamic and self.cluster > 2:
            raise BadInput("cluster", self.cluster, "1 or 2 blocks, where tiles have a dynamic order")


# Names: most rows of a tile, x stages, c blocks of a cluster; u16: units of 16 rows, not 32; d: dynamic.
SCHEDULES = {
    "64x8c1": Schedule(row_unit=16, most_rows=64, stages=8, cluster=1),
    "64x8c2": Schedule(row_unit=16, most_rows=64, stages=8, cluster=2),
    "128x6c1": Schedule(row_unit=16, most_rows=128, stages=6, cluster=1),
    "128x6c2": Schedule(row_unit=16, most_rows=128, stages=6, cluster=2),
    "256x4c1": Schedule(row_unit=32, most_rows=256, stages=4, cluster=1),
    "256x4c1d": Schedule(row_unit=32, most_rows=256, stages=4, cluster=1, dynamic=True),
    "256x4c2u16": Schedule(row_unit=16, most_rows=256, stages=4, cluster=2),
    "256x4c2u16d": Schedule(row_unit=16, most_rows=256, stages=4, cluster=2, dynamic=True),
}

# e4m3 keeps two accumulators, so tiles have at most 128 rows, and blocks 256 columns.  r: x is operand A, in units of
# 64 rows.
FP8_SCHEDULES = {
    "64x5c1": Schedule(row_unit=16, most_rows=64, stages=5, cluster=1),
    "64x5c2": Schedule(row_unit=16, most_rows=64, stages=5, cluster=2),
    "128x4c1": Schedule(row_unit=16, most_rows=128, stages=4, cluster=1),
    "128x4c1r": Schedule(row_unit=64, most_rows=128, stages=4, cluster=1, swapped=False),
    "128x4c1rd": Schedule(row_unit=64, most_rows=128, stages=4, cluster=1, swapped=False, dynamic=True),
}
# MXFP4 weights beside bfloat16 rows: slots have 128 columns, so stages are fewer.  p2: two blocks a multiprocessor.
MXFP4_SCHEDULES = {
    "48x3c1p2": Schedule(row_unit=16, most_rows=48, stages=3, cluster=1, blocks_per_sm=2),
    "64x7c1": Schedule(row_unit=16, most_rows=64, stages=7, cluster=1),
    "128x4c1": Schedule(row_unit=16, most_rows=128, stages=4, cluster=1),
    "160x3c1": Schedule(row_unit=16, most_rows=160, stages=3, cluster=1),
    "192x3c1": Schedule(row_unit=32, most_rows=192, stages=3, cluster=1),
}
# Packed MXFP4 weights beside FP8 rows have a ring of their own.  Slots of FP8 only feed the tensor cores; packed ones
# hide the latency of memory, and take the shared memory that is left.  Others were hardly faster, or slower
# (docs/maintainers/decisions.md).
PACKED_SCHEDULES = {
    "64x3c1": Schedule(row_unit=16, most_rows=64, stages=3, cluster=1, packed_stages=5),
    "128x3c1r": Schedule(row_unit=64, most_rows=128, stages=3, cluster=1, swapped=False, packed_stages=3),
    "128x3c1rd": Schedule(
        row_unit=64, most_rows=128, stages=3, cluster=1, swapped=False, dynamic=True, packed_stages=3
    ),
}
FP8_BAND = 2 * BAND  # row tiles are half as high


def _check_shape(expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int) -> None:
    check_integer("expected_rows", expected_rows, 0)
    check_sizes(groups=groups, columns=columns, depth=depth, multiprocessors=multiprocessors)


def _shape(
    dtype: torch.dtype, expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int
) -> Shape:
    return Shape(expected_rows, groups, columns, depth, -(-columns // block_columns(dtype)), multiprocessors)


def _named(dtype: torch.dtype, name: str) -> Schedule:
    return FP8_SCHEDULES[name] if dtype == torch.float8_e4m3fn else SCHEDULES[name]


@tuning.until_forgotten
def schedule_of(
    dtype: torch.dtype,
    expected_rows: int,
    groups: int,
    columns: int,
    depth: int,
    multiprocessors: int,
    gpu: str = tuning.DEFAULT_GPU,
) -> Schedule:
    """Return the schedule of one GEMM, for x and w of `dtype`, by the tables of the GPU with this name."""
    shape = _shape(dtype, expected_rows, groups, columns, depth, multiprocessors)
    return _named(dtype, tuning.gemm_schedule(gpu, "gemms", tuning.name_of(dtype), shape))


@tuning.until_forgotten
def schedule_of_both(
    dtype: torch.dtype, expected_rows: int, intermediate: int, gpu: str = tuning.DEFAULT_GPU
) -> Schedule:
    """Return the schedule of both GEMMs of a fused layer, which cut rows into the same tiles (csrc/fused/lagged.h).

    Depends on the rows and the columns of the first GEMM alone.
    """
    shape = _shape(dtype, expected_rows, 1, 2 * intermediate, 1, 1)
    schedule = _named(dtype, tuning.gemm_schedule(gpu, "fused_gemms", tuning.name_of(dtype), shape))
    return replace(schedule, dynamic=False)


def mxfp4_schedule(expected_rows: int, groups: int, columns: int, multiprocessors: int) -> Schedule:
    """Return the schedule of a GEMM of bfloat16 rows and MXFP4 weights.

    Measured on an H200 with the matrices of gpt-oss-120b.
    """
    waves = groups * -(-columns // BLOCK_COLUMNS) / multiprocessors
    if (
        expected_rows <= 4 and waves < 6
    ):  # some groups are empty; what is left is no whole number of waves of two blocks
        return MXFP4_SCHEDULES["64x7c1"]
    for most, name in ((32, "48x3c1p2"), (96, "128x4c1"), (144, "160x3c1")):
        if expected_rows <= most:
            return MXFP4_SCHEDULES[name]
    return MXFP4_SCHEDULES["192x3c1"]


def packed_as(schedule: Schedule) -> Schedule:
    """Return the schedule for packed MXFP4 weights where that of FP8 weights is `schedule`, one of FP8_SCHEDULES."""
    if schedule.most_rows == 64:
        return PACKED_SCHEDULES["64x3c1"]
    return PACKED_SCHEDULES["128x3c1rd" if schedule.dynamic else "128x3c1r"]


def check_schedule(dtype: torch.dtype, schedule: Schedule, mxfp4: bool = False) -> None:
    """Raise BadInput if `schedule` does not exist for x of `dtype` and w of the same, or in MXFP4, packed or not."""
    is_one = isinstance(schedule, Schedule)
    if mxfp4 and dtype == torch.float8_e4m3fn:
        if not (is_one and schedule in PACKED_SCHEDULES.values()):
            raise BadInput("schedule", repr(schedule), "one of PACKED_SCHEDULES")
        return
    if mxfp4:
        if not (is_one and schedule in MXFP4_SCHEDULES.values()):
            raise BadInput("schedule", repr(schedule), "one of MXFP4_SCHEDULES")
        return
    if dtype == torch.float8_e4m3fn and not (is_one and schedule in FP8_SCHEDULES.values()):
        raise BadInput("schedule", repr(schedule), "one of FP8_SCHEDULES")
    if dtype != torch.float8_e4m3fn and not (
        is_one and schedule.swapped and schedule.blocks_per_sm == 1 and schedule.packed_stages == 0
    ):
        raise BadInput("schedule", repr(schedule), "one of SCHEDULES")


def choose(expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int = 132) -> str:
    """Return the name of the schedule for `groups` groups of about `expected_rows` rows, matrices `[columns, depth]`.

    By the table shipped for the H200: the same on all ranks, whatever tables their users have.  grouped_gemm chooses by
    the table of its GPU.  `multiprocessors`: of the GPU, by default those of an H200.

    Raises:
        BadInput: sizes that are not positive integers.
    """
    _check_shape(expected_rows, groups, columns, depth, multiprocessors)
    return _shipped(torch.bfloat16, expected_rows, groups, columns, depth, multiprocessors)


def choose_fp8(expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int = 132) -> str:
    """Return the name of the FP8 schedule; see choose().

    Raises:
        BadInput: sizes that are not positive integers.
    """
    _check_shape(expected_rows, groups, columns, depth, multiprocessors)
    return _shipped(torch.float8_e4m3fn, expected_rows, groups, columns, depth, multiprocessors)


@lru_cache(maxsize=1024)
def _shipped(
    dtype: torch.dtype, expected_rows: int, groups: int, columns: int, depth: int, multiprocessors: int
) -> str:
    shape = _shape(dtype, expected_rows, groups, columns, depth, multiprocessors)
    return first_match(_shipped_rules(), tuning.name_of(dtype), shape)


@lru_cache(maxsize=1)
def _shipped_rules() -> tuple[Rule, ...]:
    return tuning.shipped(tuning.DEFAULT_GPU).gemms
