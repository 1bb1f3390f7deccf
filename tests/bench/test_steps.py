"""Decode and training steps on CPU ranks: their rows, and what a step calls, against counts and sums of our own."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from moecomm_bench import decode, training
from moecomm_bench.decode import Decode
from moecomm_bench.exchange import by_expert
from moecomm_bench.ours import Ours
from moecomm_bench.torch_layer import TorchLayer
from moecomm_bench.training import Training

from ..conftest import Ranks
from .test_case import CASE as SIZES

CASE = replace(SIZES, ranks=2, tokens=[5], replays=2, ceiling=False, inputs=3, hidden=64)
DECODE = Decode(CASE, layers=4, expert_us=100.0, delay_us=50.0, steps=3)


def test_delays_are_even_and_a_layer_waits_for_the_latest_rank() -> None:
    tables = [DECODE.delays_ns(rank) for rank in range(2)]
    assert torch.equal(tables[0], DECODE.delays_ns(0)) and not torch.equal(*tables)
    assert all(int(table.min()) >= 0 and int(table.max()) < 50_000 for table in tables)
    lists = [table.tolist() for table in tables]
    latest = [[max(a, b) for a, b in zip(*steps, strict=True)] for steps in zip(*lists, strict=True)]
    assert DECODE.waits_us() == pytest.approx(sum(map(sum, latest)) / len(latest) / 1e3)
    assert DECODE.waits_us() == pytest.approx(4 * 50 * 2 / 3, rel=0.1)  # of the later of two


def _decode(rank: int, group: Any, job: dict[str, Any]) -> dict[str, Any]:
    return decode.run_rank(group, **job)


def test_a_row_for_each_way_to_decode(ranks: Ranks) -> None:
    case = replace(CASE, layouts=["flat", "batched"], payloads=["bf16", "fp8"])
    given = replace(DECODE, case=case, intermediate=32)
    found = decode.merge(given, ranks.run(2, _decode, asdict(given)))
    rows = [(row["layout"], row["payload"], row["experts"], row["delays"]) for row in found["rows"]]
    assert rows == [
        (*way, delays)
        for way in (
            ("flat", "bf16", "stand-in"),
            ("flat", "fp8", "stand-in"),
            ("expert", "bf16", "GEMMs"),
            ("batched", "bf16", "stand-in"),
            ("batched", "fp8", "stand-in"),
        )
        for delays in (False, True)
    ]
    for row in found["rows"]:
        assert row["us"]["p50"] > (4 * 100 if row["experts"] == "stand-in" else 0)
        assert row["layer_us"] == pytest.approx(row["us"]["p50"] / 4, abs=1e-3)
    assert all(row["opened_bytes"] > row["window_bytes"] > 1 << 16 for row in found["rows"])


def _training(rank: int, group: Any, job: dict[str, Any]) -> dict[str, Any]:
    return training.run_rank(group, **job)


def test_a_training_step_is_forward_and_backward_and_stands_beside_torchs(ranks: Ranks) -> None:
    given = Training(CASE, intermediate=32, layers=2)
    found = training.merge(given, ranks.run(2, _training, asdict(given)))
    ways = [(who, what) for who in ("moecomm", "torch") for what in training.WHAT]
    assert [(row["who"], row["what"]) for row in found["rows"]] == ways
    for ours, torchs in zip(found["rows"][:2], found["rows"][2:], strict=True):
        assert ours["of_torch"] == pytest.approx(torchs["us"]["p50"] / ours["us"]["p50"], abs=1e-3)
        assert ours["layer_us"] == pytest.approx(ours["us"]["p50"] / 2, abs=1e-3)
    assert all((row.get("window_bytes", 0) > 1 << 16) == (row["who"] == "moecomm") for row in found["rows"])
    assert all(row.keys() >= {"opened_bytes"} for row in found["rows"] if row["who"] == "moecomm")


def _gradients(rank: int, group: Any) -> list[float]:
    """The largest differences from ours, over the largest value: output, and gradients of x and the weights."""
    from moecomm import ops

    device = torch.device("cpu")
    with Ours(replace(CASE, layouts=["expert"]), group, device, 5) as ours:
        given = ours.inputs[0]
        generator = torch.Generator().manual_seed(rank)
        shapes = ((6, 64, 64), (6, 64, 32))
        drawn = [torch.randn(shape, generator=generator).mul_(0.1).bfloat16() for shape in shapes]
        found = []
        for who in ("ours", "torch"):
            x = given.x.clone().requires_grad_()
            w13, w2 = (weight.clone().requires_grad_() for weight in drawn)
            if who == "ours":
                out = ops.moe(ours.buffer, x, given.topk_idx, given.topk_weights, w13, w2)
            else:
                out = TorchLayer(x.detach(), given.topk_idx, given.topk_weights, w13, w2, group).differentiable(x)
            out.float().square().mean().backward()
            found.append([out, x.grad, w13.grad, w2.grad])
        return [float((a - b).float().abs().max() / b.float().abs().max()) for a, b in zip(*found, strict=True)]


def test_torchs_layer_has_the_gradients_of_ours(ranks: Ranks) -> None:
    assert by_expert(torch.tensor([[5, 6]]), 12, 2).tolist() == [[0, 1]]
    for differences in ranks.run(2, _gradients):
        assert max(differences) < 0.03  # bfloat16, rounded at other places
