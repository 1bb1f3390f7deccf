"""Plans of fused layers: the layout of memory, and the schedule, that layers of the same sizes share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moecomm.fused import PACKED_SCHEDULES, SCHEDULES, kernels
from moecomm.fused.plan import LayerPlan, layer_plan
from moecomm.fused.schedules import packed_as
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.gemms import Rule
from moecomm.ranks.settings import Settings

BF16 = torch.bfloat16
SETTINGS = Settings(3, 7168, 14, 3, 50, BF16, "host", None)


@pytest.fixture(autouse=True)
def four_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 4)
    tuning.forget()
    yield
    tuning.forget()  # plans of such a GPU


def plan_of(settings: Settings = SETTINGS, dtype: torch.dtype = BF16, **other: Any) -> LayerPlan:
    sizes: dict[str, Any] = {"rank": 2, "device": None, "inner": 176, "apart": True, "expected_rows": 9}
    return layer_plan(settings, dtype=dtype, **{**sizes, "max_rows": None, **other})


@pytest.mark.parametrize("max_rows", [None, 0, 1, 77, 10_000])
@pytest.mark.parametrize("dtype", [BF16, kernels.FP8])
def test_parts_of_the_memory_lie_one_behind_the_other(dtype: torch.dtype, max_rows: int | None) -> None:
    plan = plan_of(dtype=dtype, max_rows=max_rows)
    assert plan.max_rows == (450 if max_rows in (None, 10_000) else max(1, max_rows or 0)), "at most the worst case"
    at, rows, row = plan.scratch, plan.max_rows, 7168 if dtype == kernels.FP8 else 2 * 7168
    with_scales = row + 4 * 7168 // 128 if dtype == kernels.FP8 else row
    assert plan.pitch >= with_scales
    sizes = {
        0: 4,  # LayerArgs::failed
        at.next_tile: 4,
        at.next_row: 4,
        at.fetched: 4 * -(-rows // kernels.LEAST_COUNTED),
        at.tile_done: 4 * plan.row_tiles,
        at.destinations: 8 * rows,
        at.rows: plan.pitch * rows,
        at.product: 176 * dtype.itemsize * rows,
    }
    if dtype == kernels.FP8:
        assert at.scales_pitch % 128 == 0 and at.scales_pitch >= 4 * 2
        sizes[at.product_scales] = at.scales_pitch * rows
    begins = [*sorted(sizes), at.nbytes]
    assert len(begins) == len(sizes) + 1 and begins[0] == 0
    for begin, behind in itertools.pairwise(begins):
        assert begin + sizes[begin] <= behind
    of_their_own = at.destinations, at.rows, at.product, at.product_scales, at.nbytes  # cache lines
    assert all(begin % 128 == 0 for begin in of_their_own)


@pytest.mark.parametrize("dtype", [kernels.FP8, torch.int8])
def test_rows_with_one_scale_are_cast_behind_the_first_product(dtype: torch.dtype) -> None:
    plan = plan_of(dtype=dtype, epilogue=kernels.Epilogue("swiglu", False, True))
    at, rows = plan.scratch, plan.max_rows
    tiles = plan_of(dtype=BF16).row_tiles
    assert plan.by_channel and plan.pitch == 7296 and plan.schedule == plan_of(dtype=BF16).schedule
    assert plan.row_tiles == 2 * tiles + 1, "words that the publish kernel sets to 0"
    parts = {
        at.fetched: 4 * -(-rows // kernels.LEAST_COUNTED),
        at.tile_done: 4 * tiles,
        at.next_cast: 4,
        at.cast_done: 4 * tiles,
        at.destinations: 8 * rows,
        at.rows: plan.pitch * rows,
        at.product: 2 * 176 * rows,
        at.product_scales: at.scales_pitch * rows,
        at.cast: 176 * rows,
    }
    begins = [*parts, at.nbytes]
    assert begins == sorted(begins) and at.scales_pitch == 4
    assert all(begin + parts[begin] <= behind for begin, behind in itertools.pairwise(begins))
    assert all(begin % 128 == 0 for begin in (at.destinations, at.rows, at.product, at.product_scales, at.cast))


def test_every_rank_has_a_tile_for_each_of_its_experts() -> None:
    first, last = plan_of(rank=0), plan_of(rank=2)  # five experts and four
    assert first.row_tiles - first.max_rows // first.schedule.most_rows == 5
    assert last.row_tiles - last.max_rows // last.schedule.most_rows == 4


def test_packed_weights_have_the_plan_of_fp8_with_slots_of_their_own() -> None:
    for name in ("64x5c1", "64x5c2", "128x4c1", "128x4c1rd"):  # a table may name any
        with tuning.use(Table(fused_gemms=(Rule("fp8", name),))):
            plan, packed = plan_of(dtype=kernels.FP8), plan_of(dtype=kernels.FP8, packed=True)
        assert packed.schedule == packed_as(plan.schedule) and packed.schedule in PACKED_SCHEDULES.values()
        assert packed.experts.threads == plan.experts.threads + 128 * (2 if packed.schedule.most_rows == 64 else 1)
        assert packed.clusters * packed.schedule.cluster == plan.clusters * plan.schedule.cluster
        changed = {"schedule": plan.schedule, "experts": plan.experts, "clusters": plan.clusters}
        assert packed._replace(**changed) == plan


def test_a_plan_is_that_of_the_sizes_and_of_the_table() -> None:
    plan = plan_of()
    assert plan_of() is plan and plan_of(replace(SETTINGS)) is plan
    assert plan_of(apart=False).experts != plan.experts and plan_of(inner=184).scratch != plan.scratch
    other = next(name for name, schedule in SCHEDULES.items() if schedule != plan.schedule)
    with tuning.use(Table(fused_gemms=(Rule("bf16", other),))):
        assert plan_of().schedule == SCHEDULES[other] and plan_of().experts != plan.experts
    assert plan_of() == plan
