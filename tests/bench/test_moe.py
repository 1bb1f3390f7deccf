"""moecomm bench moe on CPU ranks: its JSON, torch's layer against ours, and what it compares."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

import moecomm
from moecomm.fused.fp4 import dequantize
from moecomm.router import Model
from moecomm.testing import random_layer
from moecomm.testing.layers import LayerCase, expected
from moecomm_bench import moe
from moecomm_bench.cli import app
from moecomm_bench.four_bits import in_mxfp4
from moecomm_bench.layers import BY_RANK, Layers
from moecomm_bench.torch_layer import TorchLayer, TorchRankLayer

from ..conftest import Ranks

SIZES = ["--hidden", "64", "--intermediate", "32", "--topk", "3", "--experts", "8"]
KEYS = [
    ("moecomm", "layer", "sequential"),
    ("moecomm", "layer", "bf16 wire"),
    ("moecomm", "layer", "default"),
    ("moecomm", "dispatch", ""),
    ("moecomm", "GEMMs", ""),
    ("moecomm", "combine", ""),
    ("moecomm", "layer", "fp8"),
    ("moecomm", "layer", "fp8, bf16 wire"),
    ("moecomm", "layer", "fp8, default"),
    ("moecomm", "dispatch", "fp8"),
    ("moecomm", "GEMMs", "fp8"),
    ("moecomm", "layer", "mxfp4"),
    ("moecomm", "layer", "mxfp4, bf16 wire"),
    ("moecomm", "layer", "mxfp4, default"),
    ("moecomm", "GEMMs", "mxfp4"),
    ("moecomm", "layer", "packed mxfp4"),
    ("moecomm", "layer", "packed mxfp4, bf16 wire"),
    ("moecomm", "layer", "packed mxfp4, default"),
    ("moecomm", "GEMMs", "packed mxfp4"),
    ("torch", "layer", ""),
    ("torch", "layer", "rows by rank"),
    ("torch", "GEMMs", ""),
]


@pytest.mark.long
def test_the_command_measures_layers_and_their_parts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--backend", "host", "--tokens", "5,24", "--replays", "2", "--json", str(out)]
    words += ["--fp8", "--mxfp4", "--singles", "5"]
    told = CliRunner().invoke(app, ["moe", "--model", "mixtral-8x7b", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "of GEMMs" in told.stdout
    assert "alone: 5 single calls" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "moe" and found["backend"] == "host" and found["versions"]["torch"]
    about = [(row["tokens"], row["who"], row["what"], row["variant"]) for row in found["rows"]]
    assert about == [(tokens, *key) for tokens in (5, 24) for key in KEYS]
    for row in found["rows"]:
        assert 0 < row["us"]["p50"] <= row["us"]["p90"]
        dtype = next((name for name in ("fp8", "mxfp4", "packed mxfp4") if row["variant"].startswith(name)), "")
        key = (row["tokens"], "moecomm", "GEMMs", dtype)
        gemms = found["rows"][about.index(key)]["us"]["p50"]
        if row["what"] == "layer":
            assert row["of_gemms"] == pytest.approx(row["us"]["p50"] / gemms, abs=1e-3)
        work = 6 * row["tokens"] * 3 * 64 * 32  # of a rank, on average
        if row["what"] in ("layer", "GEMMs"):
            assert row["tflops"] == pytest.approx(work / row["us"]["p50"] / 1e6, abs=0.006)
            assert ("of_torch" in row) == (row["who"] != "torch" and not dtype)
        # CPU ranks have no graphs, so calls are timed alone and in a row, not eagerly beside a graph.
        assert ("alone_us" in row) == (row["what"] in ("layer", "GEMMs"))
        assert row.get("alone_us", {"p50": 1})["p50"] > 0 and not {"eager_us", "sustained_us"} & set(row)
        # The default room of a Buffer: here that of the worst case.
        assert row["max_rows"] == 2 * row["tokens"] * 3


def _torchs(rank: int, group: Any, seed: int) -> list[Any]:
    case = random_layer(
        seed, ranks=2, hidden=32, intermediate=16, num_experts=4, topk=2, max_tokens=40, dtype=torch.float32
    )
    g = torch.Generator().manual_seed(rank)
    call = {name: value for name, value in case.call(rank).items() if name in ("w13", "w2")}
    if case.interleaved:
        call["w13"] = moecomm.fused.deinterleave(call["w13"])
    call["x"] = torch.randn(7 + rank, 32, generator=g)
    call["topk_idx"] = torch.randint(0, 4, (7 + rank, 2), generator=g)
    call["topk_weights"] = torch.rand(7 + rank, 2, generator=g)
    layers = [kind(**call, group=group) for kind in (TorchLayer, TorchRankLayer)]
    with moecomm.Buffer(
        group, hidden=32, num_experts=4, topk=2, max_tokens=40, dtype=torch.float32, backend="host"
    ) as buffer:
        found = [buffer.moe(**call), *(layer.layer() for layer in layers), *(layer.layer() for layer in layers)]
        return [out.tolist() for out in found]


def test_torchs_layers_compute_what_ours_does(ranks: Ranks) -> None:
    """Both of them, and again in a second call."""
    for ours, *torchs in ranks.run(2, _torchs, 5):
        for one in torchs:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(ours), rtol=1e-4, atol=1e-5)


MODEL = Model("m", 64, 32, 8, 3)


def _outputs(rank: int, group: Any) -> dict[str, Any]:
    """Outputs of each form of the layer on each input, and the inputs."""
    case = moe.ModelsCase([MODEL], [9], 2, "host", "eager", fp8=True, mxfp4=True, inputs=2)
    cpu = torch.device("cpu")
    weights = moe._weights(case, MODEL, rank, cpu)
    with Layers(case, MODEL, 9, weights, group, group, cpu) as layers:
        made = {key: make() for key, make in layers.makers() if key[1] == "layer"}
        found = {"\n".join(key): [call().tolist() for call in calls] for key, calls in made.items()}
        inputs = [[tensor.tolist() for tensor in given.values()] for given in layers.inputs]
    return {"out": found, "inputs": inputs, "weights": [tensor.tolist() for tensor in weights.values()]}


class Packed(LayerCase):
    """A layer whose rows are cast to FP8, and whose weights are given in MXFP4."""

    def matrices(self, expert: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices in float64, as they are."""
        return self.w13[expert].to(device).double(), self.w2[expert].to(device).double()


def test_every_form_computes_the_layer_of_each_input(ranks: Ranks) -> None:
    """Within the bounds of the reference; torch's layer by rank also rounds each product and sum to bfloat16."""
    by_rank = ranks.run(2, _outputs)
    w13, w2 = (
        torch.cat([torch.tensor(found["weights"][part], dtype=torch.bfloat16) for found in by_rank]) for part in (0, 1)
    )
    assert {tuple(name.split("\n")) for name in by_rank[0]["out"]} == {key for key in KEYS if key[1] == "layer"}
    for index in range(2):
        x, ids, weights = zip(*(found["inputs"][index] for found in by_rank), strict=True)
        given: dict[str, Any] = {
            "seed": 0,
            "x": [torch.tensor(rows, dtype=torch.bfloat16) for rows in x],
            "topk_idx": [torch.tensor(rows) for rows in ids],
            "topk_weights": [torch.tensor(rows) for rows in weights],
            "bias": [None, None],
            "interleaved": False,
        }
        for rank, name in itertools.product(range(2), by_rank[0]["out"]):
            who, _, variant = name.split("\n")
            wire = torch.bfloat16 if "wire" in variant or who == "torch" else None
            used = [dequantize(in_mxfp4(w)) for w in (w13, w2)] if "mxfp4" in variant else (w13, w2)
            kind = Packed if variant.startswith("packed") else LayerCase
            fp8 = variant.startswith(("fp8", "packed"))
            of = kind(**given, w13=used[0], w2=used[1], wire=wire, fp8=fp8)
            want, out = expected(of, rank), torch.tensor(by_rank[rank]["out"][name][index], dtype=torch.float64)
            assert ((out - want.out).abs() <= want.bound * (3 if variant == BY_RANK else 1)).all(), (rank, name)
    first, second = by_rank[0]["out"]["moecomm\nlayer\nsequential"]
    assert first != second, "inputs rotate"


class Mega:
    """Stands in for deep_gemm: its layer for Hopper, as a moecomm layer of the same rank."""

    buffer: moecomm.Buffer

    def __init__(self, group: Any) -> None:
        self.group, self.destroyed = group, 0

    def get_symm_buffer_for_sm90_mega_moe(self, group: Any, experts: int, *sizes: int) -> Any:
        tokens, topk, hidden, _ = sizes
        how: dict[str, Any] = {"num_experts": experts, "topk": topk, "max_tokens": tokens, "backend": "host"}
        self.buffer = moecomm.Buffer(self.group, hidden=hidden, **how)
        self.x = self.x_sf = self.topk_idx = self.topk_weights = None
        return self

    def destroy(self) -> None:
        self.destroyed += 1
        self.buffer.close()

    def transform_weights_for_mega_moe_sm90(self, w13: Any, w2: Any) -> Any:
        return w13, w2

    def mega_moe_pre_dispatch_sm90(self, *given: Any) -> None:
        x, idx, weights, *_, self.tokens = given
        self.given = x, idx.long(), weights

    def fp8_mega_moe(self, out: torch.Tensor, w13: Any, w2: Any, buffer: Any) -> None:
        assert buffer is self and len(out) == self.tokens
        out.copy_(self.buffer.moe(*self.given, moecomm.fused.Fp8(*w13), moecomm.fused.Fp8(*w2)))


def _beside_deep_gemm(rank: int, group: Any, there: bool) -> tuple[list[dict[str, Any]], int]:
    mega = Mega(group)
    sys.modules["deep_gemm"] = cast("ModuleType", mega if there else None)
    case = moe.ModelsCase([MODEL], [9], 2, "host", "eager", fp8=True, peers=False, inputs=2, replays=1)
    case = replace(case, others=["deep_gemm"])
    case.check()
    cpu = torch.device("cpu")
    with Layers(case, MODEL, 9, moe._weights(case, MODEL, rank, cpu), group, group, cpu) as layers:
        rows = layers.rows()
    return rows, mega.destroyed


@pytest.mark.parametrize("there", [True, False])
def test_deep_gemms_layer_is_measured_beside_ours_or_named(ranks: Ranks, there: bool) -> None:
    """With the error of each against float64: several percent, of two casts to FP8."""
    for rows, destroyed in ranks.run(2, _beside_deep_gemm, there):
        assert destroyed == there
        (theirs,) = (row for row in rows if row["who"] == "deep_gemm")
        assert (theirs["what"], theirs["variant"]) == ("layer", "fp8, one launch")
        layers = {row["variant"]: row["error"] for row in rows if row["what"] == "layer" and row["who"] == "moecomm"}
        assert 0 < layers["sequential"] < 0.01 < layers["fp8"] < 0.1
        if there:
            assert theirs["error"] == layers["fp8"] and theirs["us"]
        else:
            assert "deep_gemm" in theirs["why"]
