"""moecomm bench deep-ep-layer on CPU ranks: that both calls of a pair do the same, the JSON, and the table of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moecomm_bench import deep_ep_layer
from moecomm_bench.case import RoundsCase
from moecomm_bench.cli import app

from ..conftest import Ranks

CASE = RoundsCase("", 128, 3, 8, 2, "host", [5, 600], ["flat", "batched"], ["bf16", "fp8"], [0], "eager", replays=4)
NORMAL = [
    ("dispatch", "bf16", ""),
    ("dispatch", "fp8", ""),
    ("dispatch", "bf16", "handle"),
    ("combine", "", ""),
    ("combine", "", "topk_weights"),
    ("elastic dispatch", "bf16", ""),
    ("elastic dispatch", "bf16", "ids not copied"),
    ("elastic combine", "", ""),
    ("elastic dispatch", "bf16", "expanded"),
    ("elastic dispatch", "bf16", "expanded, ids not copied"),
    ("elastic combine", "", "expanded"),
    ("hybrid dispatch", "bf16", "map"),
    ("hybrid dispatch", "bf16", "map, padded"),
    ("hybrid combine", "", "probs"),
]
LOW_LATENCY = [
    ("low-latency dispatch", "bf16", ""),
    ("low-latency dispatch", "fp8", ""),
    ("low-latency combine", "", ""),
    ("low-latency combine", "", "other weights"),
]
sys.path.append(str(Path(__file__).parents[2] / "bench"))


def same(ours: torch.Tensor, theirs: torch.Tensor, rows: Any = ...) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert torch.equal(ours[rows].float(), theirs[rows].float())


def compare(pair: deep_ep_layer.Pair, used: torch.Tensor | None) -> torch.Tensor | None:
    """Raises AssertionError unless both hand out the same; of flat rows returns which are in use."""
    ours, theirs = pair.native(), pair.compat()
    assert len(ours) == len(theirs)
    if pair.what == "low-latency dispatch":
        same(ours[1], theirs[1])
        used = torch.arange(ours[0].shape[1]) < ours[1].unsqueeze(1)
        for mine, other in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:]), strict=True):
            same(mine, other, used)
    elif (pair.variant.startswith("expanded") or pair.what.startswith("hybrid")) and "dispatch" in pair.what:
        assert used is not None
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other, slice(int(used.sum())))
    elif "dispatch" in pair.what:
        if len(ours) > 1:
            used = (ours[1] >= 0).any(dim=1)
            same(ours[1], theirs[1])
            same(ours[2], theirs[2])
        assert used is not None and 0 < int(used.sum()) < len(used)
        for mine, other in zip((ours[0], *ours[3:]), (theirs[0], *theirs[3:]), strict=True):
            same(mine, other, used)
    else:
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other)
    return used


def _pairs(rank: int, group: Any) -> list[Any]:
    found: list[Any] = []
    idx, weights = CASE.routing(24, rank)
    with deep_ep_layer.DeepEpLayer(CASE, group, torch.device("cpu"), 24) as layer:
        used = None
        for pair in layer.pairs():
            if pair.variant == "expanded":
                used = torch.cat([CASE.routing(24, source)[0] for source in range(2)]) // 4 == rank
            used = compare(pair, used)
            assert layer.window_bytes > 1 << 16
            found.append(tuple(pair.about.values()))
            if "combine" in pair.what:  # rows return as they went: once a rank, or with their weights
                owners = torch.stack([(idx // 4 == owner).any(dim=1) for owner in range(2)]).sum(dim=0)
                entries = (idx >= 0).sum(dim=1)
                times = weights.sum(dim=1) if pair.what.startswith("low") else owners
                times = entries if pair.variant == "expanded" or pair.what.startswith("hybrid") else times
                want = layer._x.float() * times.unsqueeze(1)
                torch.testing.assert_close(pair.compat()[0].float(), want, rtol=2**-7, atol=1e-5)
            if pair.variant == "topk_weights":
                torch.testing.assert_close(pair.compat()[1], weights)
    return found


def test_both_calls_of_a_pair_hand_out_the_same(ranks: Ranks) -> None:
    for found in ranks.run(2, _pairs):
        assert [tuple(about) for about in found] == NORMAL + LOW_LATENCY


@pytest.mark.long
def test_the_command_measures_both_calls(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--hidden", "128", "--experts", "8", "--topk", "3", "--tokens", "5,600", "--replays", "3"]
    words = ["deep-ep-layer", *sizes, "--ranks", "2", "--backend", "host", "--json", str(out)]
    told = CliRunner().invoke(app, words, catch_exceptions=False)
    assert told.exit_code == 0 and "of native" in told.stdout and "other weights" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "deep-ep-layer" and found["backend"] == "host" and found["versions"]["torch"]
    about = [(row["tokens"], row["what"], row["payload"], row["variant"]) for row in found["rows"]]
    assert about == [(5, *key) for key in NORMAL + LOW_LATENCY] + [(600, *key) for key in NORMAL]
    for row in found["rows"]:
        native, compat = row["us"]["native"], row["us"]["compat"]
        assert 0 < native["p50"] <= native["p90"] and 0 < compat["p50"] <= compat["p90"]
        assert row["of_native"] == pytest.approx(compat["p50"] / native["p50"], abs=1e-4)
        assert row["host_more_us"] is None  # on CPUs a call is the operation
