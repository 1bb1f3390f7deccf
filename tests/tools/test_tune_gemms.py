"""`moecomm tune gemms`: ranges of rows from measured times, and the table that the chooser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput
from moecomm.fused import FP8_SCHEDULES, SCHEDULES, kernels
from moecomm.fused.schedules import schedule_of
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Entry, Table
from moecomm.gpu.tuning.gemms import HEIGHTS, Rule, Shape, in_whole_waves, of_measured
from moecomm.gpu.tuning.layers import Bounds
from moecomm.router import MODELS
from moecomm_bench import gemm
from moecomm_bench.tune import gemms as tune_gemms
from moecomm_bench.tune import tables
from moecomm_bench.tune.gemms import Candidates

RESULTS = Path(__file__).parents[2] / "bench" / "results"
GPU = "GPU 9000"
A, B, C = "64x8c1", "128x6c1", "256x4c1"
FIXED = {"columns": 4096, "depth": 7168, "groups": 32}


pytestmark = pytest.mark.usefixtures("own_tables")


def ranges(*points: tuple[int, dict[str, float]], tolerance: float = 0.02) -> list[tuple[int | None, str]]:
    """The last rows of each range, and its schedule."""
    rules = of_measured("bf16", 4096, 7168, 32, points, tolerance)
    for rule in rules:
        assert rule.least == FIXED and {**rule.most, "rows": 0} == {**FIXED, "rows": 0}
    return [(int(rule.most["rows"]) if "rows" in rule.most else None, str(rule.schedule)) for rule in rules]


def test_a_range_ends_halfway_to_the_next_point_and_the_last_one_nowhere() -> None:
    fast_a, fast_b = {A: 1.0, B: 2.0}, {A: 2.0, B: 1.0}
    assert ranges((16, fast_a), (64, fast_a), (256, fast_b), (1024, fast_b)) == [(128, A), (None, B)]
    assert ranges((1024, fast_b), (16, fast_a)) == [(128, A), (None, B)], "in any order"
    assert ranges((16, fast_a)) == [(None, A)]
    assert ranges((16, fast_a), (64, fast_b), (256, fast_a)) == [(32, A), (128, B), (None, A)]


def test_ranges_are_few_within_the_tolerance() -> None:
    near_a, near_b = {A: 1.0, B: 1.015, C: 9.0}, {A: 1.015, B: 1.0, C: 9.0}
    assert ranges((16, near_a), (64, near_b), (256, {A: 3.0, B: 1.0, C: 9.0})) == [(None, B)]
    assert ranges((16, near_a), (64, near_b), tolerance=0.001) == [(32, A), (None, B)]
    # The fastest of all that are near enough everywhere.
    assert ranges((16, {A: 1.01, B: 1.0, C: 1.02}), (64, {A: 1.0, B: 1.019, C: 1.02})) == [(None, A)]


def test_a_schedule_that_was_not_measured_at_a_point_does_not_hold_there() -> None:
    assert ranges((16, {A: 1.0}), (64, {B: 1.0})) == [(32, A), (None, B)]


@pytest.mark.parametrize(
    ("name", "tolerance", "most"),
    [("gemm-h200", 0.02, 1.02), ("gemm-fp8-rows-h200", 0.02, 1.02), ("gemm-orders-h200", 0.02, 1.02)],
)
def test_rules_of_kept_results_are_within_the_tolerance(name: str, tolerance: float, most: float) -> None:
    """The rules of each shape, at each row that was measured; and less than one range for two points."""
    rows = [
        {"dtype": "bf16", **row}
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        if (row["gemm"] == 1) == (row["activation"] is not None)
    ]
    rows = [row for row in rows if len(HEIGHTS[row["dtype"]].keys() & row["us"].keys()) > 1]
    rules = tune_gemms.choose(rows, tolerance)
    assert rows and len(rules) < len(rows) * 0.6
    with tuning.use(Table(gemms=tuple(rules))):
        for row in rows:
            fp8 = row["dtype"] == "fp8"
            known, dtype = (FP8_SCHEDULES, kernels.FP8) if fp8 else (SCHEDULES, torch.bfloat16)
            rows_each = row["rows"] // row["experts"]
            chosen = schedule_of(dtype, rows_each, row["experts"], row["columns"], row["depth"], 132, GPU)
            us = {known_name: row["us"][known_name] for known_name in known if known_name in row["us"]}
            found = next(us[known_name] for known_name in us if known[known_name] == chosen)
            assert found <= most * min(us.values()), row


def candidates(**other: Any) -> Candidates:
    given: dict[str, Any] = {"models": [MODELS["mixtral-8x7b"]], "ranks": [4], "rows": [8, 64], "dtypes": ["bf16"]}
    return Candidates(**{**given, **other})


def test_both_gemms_of_each_model_and_dtype_are_measured() -> None:
    cases = candidates(dtypes=["bf16", "fp8"], ranks=[2, 4]).gemms()
    assert [(case.dtype, case.ranks, case.gemm, case.activation) for case in cases] == [
        (dtype, ranks, *which) for ranks in (2, 4) for dtype in ("bf16", "fp8") for which in ((1, "swiglu"), (2, None))
    ]
    for case in cases:  # of 8 experts a token picks 2
        assert candidates(rows=[1, 8, 64]).tokens(case) == [max(1, rows * 4 // case.ranks) for rows in (1, 8, 64)]


@pytest.mark.parametrize(
    "wrong", [{"rows": []}, {"rows": [0]}, {"replays": 0}, {"ranks": [3]}, {"dtypes": ["int8"]}, {"rows": [1 << 20]}]
)
def test_candidates_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        candidates(**wrong).gemms()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """A GPU on which all GEMMs take these times, by schedule: first of few rows, then of many."""
    times: list[dict[str, float]] = [{A: 1.0, B: 2.0}, {A: 2.0, B: 1.0}]

    def rows(case: gemm.Gemm, tokens: list[int], device: torch.device, replays: int) -> list[dict[str, Any]]:
        about = {"dtype": case.dtype, "columns": case.columns, "depth": case.depth, "experts": case.experts}
        found = zip(candidates().rows, times, strict=True)
        return [{**about, "rows": each * case.experts, "us": us} for each, us in found]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # for the origin of a result
    monkeypatch.setattr(tables, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(gemm, "schedules_of", rows)
    return times


def test_the_table_is_written_and_decides(measured: list[dict[str, float]], tmp_path: Path) -> None:
    path = tune_gemms.tune(candidates(), measurements=tmp_path / "times.json")
    assert path == tuning.users_path(GPU) and path.stat().st_mode & 0o777 == 0o600
    rules = tuning.users(GPU).gemms
    assert [(rule.shape, rule.most.get("rows"), rule.schedule) for rule in rules] == [
        (("bf16", 4096, 14336, 2), 22, A),
        (("bf16", 4096, 14336, 2), None, B),
        (("bf16", 28672, 4096, 2), 22, A),
        (("bf16", 28672, 4096, 2), None, B),
    ]
    found = [schedule_of(torch.bfloat16, rows, 2, 28672, 4096, 132, GPU) for rows in (0, 22, 23, 9999)]
    assert found == [SCHEDULES[name] for name in (A, A, B, B)]
    assert len(json.loads((tmp_path / "times.json").read_text())["rows"]) == 4


def test_what_is_not_measured_again_is_kept(measured: list[dict[str, float]]) -> None:
    other: dict[str, float] = {"columns": 8, "depth": 8, "groups": 1}
    older = Table(
        entries=(Entry("dispatch", "flat", 2, 8, 4, 1),),
        gemms=(Rule("bf16", C, other, other), Rule("bf16", B, most={"rows": 3}), Rule("fp8", "64x5c1")),
        fused_gemms=(Rule("fp8", "64x5c2", most={"rows": 8}),),
        layers=(Bounds("bf16", 2, 1, 1),),
    )
    tables.store(GPU, older, None)
    tune_gemms.tune(candidates())
    measured[:] = [{A: 2.0, B: 1.0}] * 2
    tune_gemms.tune(candidates())
    found = tuning.users(GPU)
    assert [rule.schedule for rule in found.gemms] == [B, B, C, B, "64x5c1"], "new ones first"
    assert found == tuning.Table(older.entries, found.gemms[:2] + older.gemms, older.fused_gemms, older.layers)


def test_a_rule_of_one_shape_is_told_from_a_general_one() -> None:
    rows: dict[str, float] = {"rows": 8}
    fixed: dict[str, float] = dict(FIXED)
    assert Rule("bf16", A, fixed, fixed | rows).shape == ("bf16", 4096, 7168, 32)
    general = (Rule("bf16", A), Rule("bf16", A, rows, rows), Rule("bf16", A, fixed), Rule("bf16", A, {}, fixed))
    wider = Rule("bf16", A, fixed, fixed | {"groups": 33})
    assert [rule.shape for rule in (*general, wider)] == [None] * 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "fp16"},
        {"schedule": "1x1"},
        {"schedule": "64x5c1"},  # of the other dtype
        {"schedule": {}},
        {"schedule": {"64x8c1": 0}},
        {"schedule": 3},
        {"least": {"height": 1}},
        {"least": {"rows": "1"}},
        {"most": [1]},
        {"most": {"rows": float("inf")}},
        {"paired": 1.5},
        {"speed": 7},
    ],
)
@pytest.mark.parametrize("kind", ["gemms", "fused_gemms"])
def test_a_rule_that_could_choose_nothing_is_refused(wrong: dict[str, Any], kind: str) -> None:
    line = {"dtype": "bf16", "schedule": "64x8c1"}
    assert tuning.parse(json.dumps({kind: [line]}))
    with pytest.raises(ValueError, match=r"want|not a table"):
        tuning.parse(json.dumps({kind: [line | wrong]}))


def test_layers_have_rules_of_rows_and_columns_alone() -> None:
    for wrong in ({"most": {"waves": 1}}, {"least": {"depth": 1}}, {"schedule": {"64x8c1": 1}}):
        with pytest.raises(ValueError, match="fused_gemms"):
            tuning.parse(json.dumps({"fused_gemms": [{"dtype": "bf16", "schedule": "64x8c1", **wrong}]}))


def test_whole_waves_of_few_tiles() -> None:
    """With 130 multiprocessors two groups of 100 tiles each need two waves, of 65 tiles one."""
    times, heights = {A: 1.5, B: 1.0}, {A: 64, B: 128}

    def chosen(rows: int, tiles: int) -> str | None:
        return in_whole_waves(times, heights, Shape(rows, 2, 128 * tiles, 512, tiles, 130))

    assert chosen(128, 65) == B  # one wave of 128 rows, against two of 64
    assert chosen(64, 65) == B and chosen(0, 65) in (A, B)
    assert chosen(192, 65) == B  # two waves of 96 rows, against three of 64 that take half as long again
    assert chosen(128 * 8, 65) is None  # eight waves
