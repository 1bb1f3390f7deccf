"""An expert layer in one launch: rows are fetched, and go home, while both GEMMs are under way.

csrc/README.md, "In one launch", says how.  All but the GEMMs is as in two launches.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moecomm.fused import gemm, kernels, schedules
from moecomm.fused.schedules import Schedule
from moecomm.fused.two_launches import FETCH_BYTES, FETCHERS, LEAST_COUNTED, Layer, LayerArgs, row_config

if TYPE_CHECKING:
    from moecomm.routed import Routed

DEALT_BYTES = 320 + FETCH_BYTES  # at least DealtShared of csrc/fused/dealt.cuh, and FetchShared
# Tiles of the first GEMM, for every cluster of the launch, that are taken between the last that makes a band of rows
# and the first that multiplies it: with two, one that each has begun and one that it has before it.
LAG = 2
_LONG_TURN, _SHORT_TURN_ROWS, _LONG_ROW = 64, 1024, 2048
_TOGETHER = 2  # rows of a block that all fetch, at most
_MORE_WANTED = 16  # rows that the first experts may have more than others
_LINE = 128 // 4  # scales


class OneLaunchArgs(ctypes.Structure):
    """OneLaunchArgs of csrc/fused/one_launch.cuh."""

    _fields_ = (
        ("first", kernels.GemmArgs),
        ("second", kernels.GemmArgs),
        ("layer", LayerArgs),
        ("fetchers", ctypes.c_int32),
        ("together", ctypes.c_int32),
        ("lag", ctypes.c_int32),
        ("turn", ctypes.c_int32),
        ("padding", ctypes.c_uint8 * (-(ctypes.sizeof(LayerArgs) + 16) % 64)),
    )


def one_kernel(
    dtype: torch.dtype,
    apart: bool,
    schedule: Schedule,
    hidden: int,
    out: torch.dtype | None = None,
    counted: int = LEAST_COUNTED,
) -> kernels.SharedKernel:
    """The launch; `dtype`: of rows as they travel, and of what the first GEMM makes of them; `out`: of what is sent, if
    not `dtype`.
    """
    one = ("fused/one_launch", "fetch_multiply_and_send", "OneLaunchArgs")
    more = f", {row_config(dtype, hidden, counted)}, Type::{kernels.TYPES[out or dtype]}"
    return kernels.gemm_kernel(dtype, True, apart, schedule, *one, more, beside=DEALT_BYTES)


def rotation_step_of(schedule: Schedule, row_bytes: int) -> int:
    """Row tiles of a turn of either GEMM; `row_bytes`: of a row between the two.

    With few, what is made at any time is of both GEMMs, whose weights and rows have the second-level cache to share.
    With many, rows go home while the second is on, and the links idle while the first is: where rows between the two
    are short, what is sent is much for the products that it takes, and turns are of 1024 rows.
    bench/results/at-work-*.json has both, and what lies between.
    """
    return _LONG_TURN if row_bytes > _LONG_ROW else _SHORT_TURN_ROWS // schedule.most_rows


def rows_at_once(rows: int, tiles: kernels.GemmArgs, clusters: int) -> int:
    """What the first tiles of all clusters are made of, where every expert has about so many rows: of all counters that
    they wait for.
    """
    most_rows, column_tiles = int(tiles.most_rows), int(tiles.column_tiles)
    row_tiles = min(int(tiles.band), -(-max(1, rows) // most_rows))
    wanted = -(-clusters // (row_tiles * column_tiles)) * min(rows, row_tiles * most_rows)
    return -(-(wanted + _MORE_WANTED) // LEAST_COUNTED) * LEAST_COUNTED


class OneLaunch(Layer):
    """See moecomm.fused.layer.Prepared."""

    @cached_property
    def _schedule(self) -> Schedule:
        return schedules.schedule_of_both(self._dtype, self._rows, self._w2[0].shape[2])

    def _row_tiles(self) -> int:
        return len(self._w2[0]) + self._max_rows // self._schedule.most_rows

    def compute(self, routed: Routed) -> None:
        """Both GEMMs, when the dispatch has been enqueued."""
        given, then = self._operands(routed, _LINE)
        schedule, apart, hidden = self._schedule, not self._interleaved, self._buffer.hidden
        inner, clusters = self._w2[0].shape[2], self._sms // schedule.cluster
        blocks = clusters * schedule.cluster
        few = self._counted == LEAST_COUNTED
        first = gemm.arguments(given, apart, then.x.data_ptr(), then.x_scales, schedule)
        args = OneLaunchArgs(
            first=first,
            second=gemm.arguments(then, False, 0, None, schedule),
            layer=self._args,
            fetchers=min(FETCHERS, blocks),
            # Of many rows those that fetch begin at once.
            together=min(rows_at_once(self._rows, first, clusters), _TOGETHER * blocks) if few else 0,
            lag=LAG * clusters,
            turn=rotation_step_of(schedule, inner * then.x.itemsize),
        )
        self._launch(one_kernel(self._dtype, apart, schedule, hidden, self._buffer.dtype, self._counted), blocks, args)
