"""The benchmark on GPUs: in graphs and one by one, chained and cold, beside a matmul."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.bench import deep_ep_layer, dispatch_combine
from moecomm.bench.case import Case

SIZES: dict[str, Any] = {"model": "", "hidden": 1024, "topk": 4, "experts": 32, "backend": "lsa"}


def run(**other: Any) -> dict[str, Any]:
    ranks = min(4, torch.cuda.device_count())
    given = {"tokens": [16], "layouts": ["flat", "expert"], "payloads": ["bf16", "fp8"], "sms": [0], "replays": 3}
    found = dispatch_combine.run(Case(**SIZES, ranks=ranks, **{"mode": "graph", "chain": 5, **given, **other}))
    assert found is not None
    return found


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert "why" not in row, row
        assert 0 < row["us"]["p50"] <= row["us"]["p90"] <= row["us"]["p99"] < 1e5
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
def test_both_calls_of_deep_eps_interface_have_figures(mode: str) -> None:
    ranks = min(4, torch.cuda.device_count())
    sizes: dict[str, Any] = {"ranks": ranks, "tokens": [16, 600], "layouts": ["flat", "batched"], "payloads": ["bf16"]}
    found = deep_ep_layer.run(Case(**SIZES, **sizes, sms=[0], mode=mode, replays=3, chain=5))
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
