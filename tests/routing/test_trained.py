"""The recorded routing of a small trained model: what docs say of it, and rounds that replay it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.router import MODELS
from moecomm.routing import Recorded, join, loads, synthesize
from moecomm.testing import LocalBuffers, check_case
from moecomm.testing.cases import Case
from moecomm_bench.case import RoundsCase as BenchCase

from ..bench.test_dispatch_combine import measured
from ..conftest import Ranks

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "routing" / "byte-model.routing"
MODEL = MODELS["gpt-oss-120b"]  # has as many experts
LAYERS, CALLS, TOKENS = 3, 8, 512  # TOKENS: of a call


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded.load(FILE)


def test_the_file_has_three_layers_of_trained_gates_and_is_small(recorded: Recorded) -> None:
    assert FILE.stat().st_size < 100_000
    assert (recorded.experts, recorded.topk) == (MODEL.num_experts, MODEL.topk)
    assert (recorded.source, recorded.layers) == ("recorded", tuple(f"moe.{n}" for n in range(LAYERS)))
    assert recorded.records.tolist() == [[n, step, TOKENS] for step in range(CALLS) for n in range(LAYERS)]
    assert int(recorded.topk_idx.min()) >= 0


def described(name: str, of: Recorded) -> str:
    """A row of the table in docs/routing.md."""
    (load,) = loads(of)
    calls = torch.stack([torch.bincount(ids.flatten(), minlength=of.experts) for ids in of.topk_idx.split(TOKENS)])
    busiest = float((calls.amax(dim=1) / calls.float().mean(dim=1)).median())
    figures = [load.busiest_expert, busiest, *(load.busiest_rank[ranks] for ranks in (4, 8, 64))]
    return f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def test_the_documents_have_its_loads_beside_drawn_ones(recorded: Recorded) -> None:
    of_layers = {f"`{layer}`": join([recorded], layer) for layer in recorded.layers}
    drawn = {
        name: synthesize(MODEL.name, CALLS * TOKENS, zipf=zipf)
        for name, zipf in (("drawn, even", 0), ("drawn, Zipf 0.8", 0.8))
    }
    page = (ROOT / "docs" / "routing.md").read_text()
    rows = [described(name, of) for name, of in (of_layers | drawn).items()]
    assert "\n".join(rows) in page
    said = re.search(r"(\d+) steps.*?loss of ([\d.]+) nats a byte", page, re.DOTALL)
    assert said and said.groups() == (recorded.notes["steps"], recorded.notes["loss"])
    assert recorded.notes["text"] in page


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_rounds_that_replay_it_match_the_reference(layout: str, recorded: Recorded) -> None:
    """A round of 4 ranks for each layer, with all tokens of the layer."""
    ranks, tokens, hidden = 4, CALLS * TOKENS // 4, 16
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": recorded.experts, "topk": recorded.topk}
    with LocalBuffers(ranks, **sizes, max_tokens=tokens, backend="host", timeout_s=30) as local:
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(layer)
            ids = [recorded.dealt(tokens, layer * ranks + rank)[0] for rank in range(ranks)]
            case = Case(
                seed=layer,
                layout=layout,
                alignment=1,
                x=[torch.randn(tokens, hidden, generator=generator).bfloat16() for _ in ids],
                topk_idx=ids,
                topk_weights=[torch.rand(tokens, recorded.topk, generator=generator) for _ in ids],
                quantize=None,
                scale_format="fp32",
                scale_layout="row",
                scales=None,
                begin=False,
                weighted=True,
                wire=None,
                bias=[None] * ranks,
                weight_grads=True,
                workers=None,
                in_window=False,
                again=False,
                own_weights=None,
                max_rows=None,
            )
            check_case(local, case)


def test_dispatch_combine_replays_it(ranks: Ranks) -> None:
    layouts = ["flat", "expert", "batched"]
    case = BenchCase(
        *(MODEL.name, 64, MODEL.topk, MODEL.num_experts, 2, "host", [128], layouts, ["bf16"], [1], "eager"),
        replays=1,
        routing_file=str(FILE),
    )
    case.check()
    found = measured(ranks, case)
    assert {row["layout"] for row in found["rows"]} == set(layouts)
    assert all(row["us"]["p50"] > 0 for row in found["rows"])
    about = found["case"]["routing"]
    assert (found["case"]["routing_file"], about["source"], about["model"]) == (FILE.name, "recorded", "byte-model")


@pytest.mark.long
def test_the_program_that_made_it_trains_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    program = importlib.import_module("trained_routing")
    monkeypatch.setattr(sys, "argv", ["trained_routing.py", "--steps", "1", "--out", str(tmp_path / "x.routing")])
    program.main()
    found = Recorded.load(tmp_path / "x.routing")
    assert found.notes["steps"] == "1" and 4 < float(found.notes["loss"]) < 7
    assert found.records.tolist() == [[n, step, TOKENS] for step in range(CALLS) for n in range(LAYERS)]
