"""The benchmark on GPUs: in graphs and one by one, chained and cold, beside a matmul."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm_bench import decode, deep_ep_layer, dispatch_combine, training
from moecomm_bench.case import RoundsCase

SIZES: dict[str, Any] = {"model": "", "hidden": 1024, "topk": 4, "experts": 32, "backend": "lsa"}


def run(**other: Any) -> dict[str, Any]:
    ranks = min(4, torch.cuda.device_count())
    given = {"tokens": [16], "layouts": ["flat", "expert"], "payloads": ["bf16", "fp8"], "sms": [0], "replays": 3}
    found = dispatch_combine.run(RoundsCase(**SIZES, ranks=ranks, **{"mode": "graph", "chain": 5, **given, **other}))
    assert found is not None
    return found


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert "why" not in row, row
        for times in (row[name] for name in ("us", "alone_us", "eager_us") if name in row):
            assert 0 < times["p50"] <= times["p90"] <= times["p99"] < 1e5
        assert row["host_us"] > 0


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("cold", [False, True])
def test_every_row_has_figures(mode: str, cold: bool) -> None:
    found = run(mode=mode, cold=cold)
    check(found["rows"])
    assert {row["who"] for row in found["rows"]} >= {"moecomm", "nccl"}
    assert found["ceiling"][0]["gbs"] > 50
    ours = [row for row in found["rows"] if row["who"] == "moecomm"]
    assert all(row["sms"] >= 1 and 0 < row["of_wire"] < 1.1 for row in ours)


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_single_calls_start_together_and_take_longer_than_nothing(mode: str) -> None:
    found = run(mode=mode, singles=20, ceiling=False)
    check(found["rows"])
    floor = found["alone"]["floor_us"]["p50"]
    assert found["alone"]["calls"] == 20 and 0 <= floor < 20 and 0 < found["alone"]["step_ns"] <= 2000
    for row in found["rows"]:
        assert row["alone_us"]["p50"] > floor and ("eager_us" in row) == (mode == "graph")


@pytest.mark.gpu2
def test_decode_and_training_steps_have_figures() -> None:
    ranks = min(4, torch.cuda.device_count())
    sizes: dict[str, Any] = {"ranks": ranks, "tokens": [16], "layouts": ["flat", "batched"], "payloads": ["fp8"]}
    case = RoundsCase(**SIZES, **sizes, sms=[0], mode="graph", replays=3, ceiling=False)
    steps = decode.run(decode.Decode(case, layers=6, expert_us=30.0, delay_us=40.0, steps=5, intermediate=256))
    assert steps is not None and len(steps["rows"]) == 2 * 3
    for row in steps["rows"]:
        assert "why" not in row, row
        assert row["us"]["p50"] > (6 * 30 if row["experts"] == "stand-in" else 0)
    found = training.run(training.Training(case, intermediate=256, layers=2))
    assert found is not None
    assert [row.get("why") for row in found["rows"]] == [None] * 4


@pytest.mark.gpu2
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_both_calls_of_deep_eps_interface_have_figures(mode: str) -> None:
    ranks = min(4, torch.cuda.device_count())
    sizes: dict[str, Any] = {"ranks": ranks, "tokens": [16, 600], "layouts": ["flat", "batched"], "payloads": ["bf16"]}
    found = deep_ep_layer.run(RoundsCase(**SIZES, **sizes, sms=[0], mode=mode, replays=3, chain=5))
    assert found is not None and len(found["rows"]) == 13 + 9
    for row in found["rows"]:
        assert "why" not in row, row
        assert 0 < row["us"]["native"]["p50"] < 1e5 and 0 < row["us"]["compat"]["p50"] < 1e5
        if mode == "eager":
            assert 0 < row["host_us"]["native"] < row["host_us"]["compat"] + 1e3
        else:
            assert row["host_more_us"] is None


@pytest.mark.gpu2
def test_blocks_are_those_asked_for() -> None:
    found = run(sms=[4, 8], peers=False, ceiling=False)
    check(found["rows"])
    assert {(row["sms_asked"], row["sms"]) for row in found["rows"]} == {(4, 4), (8, 8)}


@pytest.mark.gpu2
def test_a_matmul_beside_rounds_keeps_a_part_of_its_speed() -> None:
    found = run(sms=[8], layouts=["flat"], payloads=["fp8"], peers=False, ceiling=False, overlap_gemm=True)
    beside = [row["overlap"] for row in found["rows"] if row["what"] != "pair"]
    assert len(beside) == 3
    for overlap in beside:
        assert 0.3 < overlap["kept"] < 1.1 and overlap["gemm_tflops"] > 50
    (halves,) = (row["halves"] for row in found["rows"] if row["what"] == "dispatch")
    assert max(halves["halves"], halves["gemm"]) < 1.2 * halves["together"] < 1.5 * (halves["halves"] + halves["gemm"])
