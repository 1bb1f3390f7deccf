"""moecomm bench moe on CPU ranks: its JSON, torch's layer against ours, and what it compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moecomm
from moecomm.bench import moe
from moecomm.bench.cli import app
from moecomm.bench.torch_layer import TorchLayer
from moecomm.errors import BadInput
from moecomm.router import MODELS, Model
from moecomm.testing import random_layer

from ..conftest import Ranks

SIZES = ["--hidden", "64", "--intermediate", "32", "--topk", "3", "--experts", "8"]
KEYS = [
    ("moecomm", "layer", "sequential"),
    ("moecomm", "dispatch", ""),
    ("moecomm", "GEMMs", ""),
    ("moecomm", "combine", ""),
    ("moecomm", "layer", "fp8"),
    ("moecomm", "dispatch", "fp8"),
    ("moecomm", "GEMMs", "fp8"),
    ("torch", "layer", ""),
    ("torch", "GEMMs", ""),
]


@pytest.mark.long
def test_the_command_measures_layers_and_their_parts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--backend", "host", "--tokens", "5,24", "--replays", "2", "--fp8", "--json", str(out)]
    told = CliRunner().invoke(app, ["moe", "--model", "mixtral-8x7b", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "of GEMMs" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "moe" and found["backend"] == "host" and found["versions"]["torch"]
    about = [(row["tokens"], row["who"], row["what"], row["variant"]) for row in found["rows"]]
    assert about == [(tokens, *key) for tokens in (5, 24) for key in KEYS]
    for row in found["rows"]:
        assert 0 < row["us"]["p50"] <= row["us"]["p90"]
        key = (row["tokens"], "moecomm", "GEMMs", "fp8" if row["variant"] == "fp8" else "")
        gemms = found["rows"][about.index(key)]["us"]["p50"]
        if row["what"] == "layer":
            assert row["of_gemms"] == pytest.approx(row["us"]["p50"] / gemms, abs=1e-3)
        work = 6 * row["tokens"] * 3 * 64 * 32  # of a rank, on average
        if row["what"] in ("layer", "GEMMs"):
            assert row["tflops"] == pytest.approx(work / row["us"]["p50"] / 1e6, abs=0.006)
            assert ("of_torch" in row) == (row["who"] != "torch" and row["variant"] != "fp8")


def test_any_number_of_ranks_has_the_room_of_four() -> None:
    model, rooms = MODELS["deepseek-v3"], set()
    for ranks in (1, 2, 4, 8):
        rooms.add(moe._window_bytes(moe.Case([model], [8192], ranks, "lsa", "graph"), model, 8192))
    rows = 4 * 8192 * model.topk
    assert len(rooms) == 1 and rooms.pop() > 2 * rows * model.hidden * 2


def _rooms(rank: int, group: Any, room: int) -> list[int]:
    model = Model("", 64, 32, 8, 3)
    case = moe.Case([model], [5, 24], 1, "host", "eager", room=room)
    found = []
    for tokens in case.tokens:
        with moe.Layers(case, model, tokens, {}, group, group, torch.device("cpu")) as layers:
            found.append(layers.buffer.max_tokens)
    return found


@pytest.mark.parametrize(("room", "most"), [(0, [5, 24]), (16, [16, 24])])
def test_a_buffer_may_have_more_room(ranks: Ranks, room: int, most: list[int]) -> None:
    assert ranks.run(1, _rooms, room) == [most]


def _torchs(rank: int, group: Any) -> list[Any]:
    case = random_layer(
        5, ranks=2, hidden=32, intermediate=16, num_experts=4, topk=2, max_tokens=40, dtype=torch.float32
    )
    g = torch.Generator().manual_seed(rank)
    call = {name: value for name, value in case.call(rank).items() if name in ("w13", "w2")}
    if case.interleaved:
        call["w13"] = moecomm.fused.deinterleave(call["w13"])
    call["x"], call["topk_idx"] = (
        torch.randn(7 + rank, 32, generator=g),
        torch.randint(0, 4, (7 + rank, 2), generator=g),
    )
    call["topk_weights"] = torch.rand(7 + rank, 2, generator=g)
    other = TorchLayer(**call, group=group)
    with moecomm.Buffer(
        group, hidden=32, num_experts=4, topk=2, max_tokens=40, dtype=torch.float32, backend="host"
    ) as buffer:
        return [other.layer().tolist(), buffer.moe(**call).tolist()]


def test_torchs_layer_computes_what_ours_does(ranks: Ranks) -> None:
    for torchs, ours in ranks.run(2, _torchs):
        torch.testing.assert_close(torch.tensor(torchs), torch.tensor(ours), rtol=1e-4, atol=1e-5)


def test_a_row_that_failed_has_no_figures_and_compares_with_nothing() -> None:
    case = moe.Case([MODELS["mixtral-8x7b"]], [1], 2, "host", "eager")
    timed = {"model": "m", "tokens": 1, "variant": "", "host_us": None, "flops": 8_000_000}
    ours, torchs, failed = ({**timed, "who": who, "what": "GEMMs"} for who in ("moecomm", "torch", "deep_gemm"))
    del failed["flops"], failed["host_us"]
    parts = [
        {"backend": "host", "rows": [ours | {"us": [2.0, 4.0]}, torchs | {"us": [6.0, 6.0]}, failed | {"why": "x"}]}
    ]
    first, second, third = moe.merge(case, parts * 2)["rows"]
    assert first["us"]["p50"] == 3 and first["of_torch"] == 2 and first["tflops"] == round(8 / 3, 2)
    assert "of_torch" not in second and third["why"] == "x" and "us" not in third


def test_fp8_compares_with_gemms_in_fp8() -> None:
    case = moe.Case([MODELS["mixtral-8x7b"]], [1], 2, "host", "eager", fp8=True)
    timed = {"model": "m", "tokens": 1, "who": "moecomm", "host_us": None, "flops": 0}
    us = {("GEMMs", ""): 8.0, ("GEMMs", "fp8"): 4.0, ("layer", "fp8"): 6.0, ("layer", "fp8, two launches"): 5.0}
    rows = [{**timed, "what": what, "variant": variant, "us": [time]} for (what, variant), time in us.items()]
    rows.append({**timed, "who": "torch", "what": "layer", "variant": "", "us": [20.0]})
    found = moe.merge(case, [{"backend": "host", "rows": rows}] * 2)["rows"]
    assert [row.get("of_gemms") for row in found] == [None, None, 1.5, 1.25, 2.5]
    assert all("of_torch" not in row for row in found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": []}, "tokens"),
        ({"ranks": 3}, "ranks"),
        ({"mode": "graph"}, "mode"),
        ({"replays": 0}, "replays"),
        ({"room": -1}, "room"),
    ],
)
def test_what_can_not_be_measured_is_named(change: dict[str, Any], why: str) -> None:
    good = {"models": [MODELS["mixtral-8x7b"]], "tokens": [4], "ranks": 2, "backend": "host", "mode": "eager"}
    with pytest.raises(BadInput, match=why):
        moe.Case(**(good | change)).check()
