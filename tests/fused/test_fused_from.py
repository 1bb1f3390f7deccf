"""Meaning of `fused`: None beside what was measured, and what else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moecomm.buffer import Buffer
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import forms, layer
from moecomm.fused.kernels import FP8
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.layers import Bounds, Form, Kind
from moecomm.ranks import messages
from moecomm.ranks.settings import Settings
from moecomm.router import MODELS, Model
from moecomm_bench import moe

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100 = "NVIDIA H100 80GB HBM3"  # has no table of its own
VARIANTS = {BF16: ("sequential", moe.FUSED), FP8: ("fp8", f"fp8, {moe.FUSED}")}
RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("moe-*-h[12]00-[24].json"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_none_is_what_was_faster(path: Path) -> None:
    found: dict[tuple[int, str], float] = {}
    result = json.loads(path.read_text())
    assert not result["case"].get("room"), "Buffers that are full"
    for row in result["rows"]:
        if (row["who"], row["what"]) == ("moecomm", "layer"):
            found[row["tokens"], row["variant"]] = row["us"]["p50"]
            model = MODELS[row["model"]]
    for weights, (apart, fused) in VARIANTS.items():
        chosen = set()
        for tokens in (tokens for tokens, variant in found if variant == fused):
            buffer = cast(Any, buffer_of(model, result["case"]["ranks"], tokens))
            under = layer._runs_fused(buffer, weights, None, str)
            ratio = found[tokens, apart] / found[tokens, fused]  # how much faster under the experts
            assert ratio >= 0.999 if under else ratio <= 1.02, tokens
            chosen.add(under)
        assert True in chosen or not chosen, "weights that were measured"


def settings_of(model: Model, ranks: int, tokens: int) -> Settings:
    return Settings(ranks, model.hidden, model.num_experts, model.topk, tokens, BF16, "lsa", None)


def buffer_of(model: Model, ranks: int, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(origin=SimpleNamespace(fused_weights=forms.faster(H100, settings_of(model, ranks, tokens))))


@pytest.mark.parametrize(
    ("weights", "ranks", "tokens", "fused", "why_not", "under"),
    [
        (BF16, 4, 128, None, "", True),
        (FP16, 4, 128, None, "", True),
        (BF16, 4, 1, None, "", True),  # 64 experts a rank
        (FP8, 4, 1, None, "", True),
        (BF16, 2, 1, None, "", True),
        (FP8, 2, 512, None, "", True),
        (FP8, 2, 511, None, "", False),  # fewer than 32 rows an expert
        (BF16, 8, 256, None, "", True),  # not measured: from more rows on than of 4 ranks
        (BF16, 8, 255, None, "", False),
        (FP8, 8, 256, None, "", True),
        (FP8, 8, 255, None, "", False),
        (BF16, 16, 8192, None, "", False),  # nothing is known
        (FP32, 4, 8192, None, "", False),
        (BF16, 4, 8192, None, "no GPU", False),
        (BF16, 4, 8192, False, "", False),
        (BF16, 1, 1, True, "", True),
        (FP8, 1, 1, True, "", True),
        (BF16, 1, 1, True, "no GPU", False),
    ],
)
def test_by_the_buffer_and_its_weights(
    weights: torch.dtype, ranks: int, tokens: int, fused: bool | None, why_not: str, under: bool
) -> None:
    buffer = cast(Any, buffer_of(MODELS["deepseek-v3"], ranks, tokens))
    assert layer._runs_fused(buffer, weights, fused, lambda: why_not) == under


def test_by_the_rows_of_a_rank() -> None:
    """Two experts here, which have many rows each when a rank has few."""
    for weights, least in ((BF16, 16), (FP8, 256)):
        for tokens in (least, least - 1):
            buffer = cast(Any, buffer_of(MODELS["mixtral-8x7b"], 4, tokens))
            assert layer._runs_fused(buffer, weights, None, str) == (tokens == least)


def test_one_rank_is_fused_where_that_was_measured_to_be_faster() -> None:
    """In FP8, with 64 experts and top-8 of DeepSeek-V3's sizes and with 96 and top-6: 1.10 to 1.20 times as fast."""
    for experts, topk, tokens, fused in (
        (64, 8, 128, False),
        (64, 8, 512, True),
        (96, 6, 128, False),
        (96, 6, 4096, True),
    ):
        model = replace(MODELS["deepseek-v3"], num_experts=experts, topk=topk)
        buffer = cast(Any, buffer_of(model, 1, tokens))
        assert layer._runs_fused(buffer, FP8, None, str) == fused
        assert not layer._runs_fused(buffer, BF16, None, str)


def answers(rank: int, other: bytes) -> Any:
    """Return the two ranks of a Buffer that opens, as one of them sees them."""
    return SimpleNamespace(all_gather=lambda data: [data, other] if rank == 0 else [other, data])


def test_all_ranks_do_what_the_table_of_the_first_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of different hosts have different tables, and each rank reads its own."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)
    settings, gpu = settings_of(MODELS["deepseek-v3"], 2, 4096), torch.device("cuda", 0)
    bounds = [Bounds("bf16", 2, 1, 1, 0), Bounds("fp8", 2, 1, 1)]
    with tuning.use(Table(layers=tuple(bounds))):
        first = forms.agree(answers(0, b""), settings, gpu)[0]
    assert first == {BF16: False, FP16: False, FP8: True}
    shipped = forms.agree(answers(0, b""), settings, gpu)[0]
    assert shipped == {BF16: True, FP16: True, FP8: True}
    packed = messages.pack(forms.LayerForms(list(first.values()), []))
    assert forms.agree(answers(1, packed), settings, gpu) == (first, {})


def test_a_buffer_keeps_what_its_ranks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "agree", lambda ranks, settings, device: ({BF16: settings.topk == 3}, {}))
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 4, "max_tokens": 8, "backend": "host"}
    for topk in (3, 2):
        with Buffer("self", topk=topk, **sizes) as buffer:
            found = [layer._runs_fused(buffer.rounds, weights, None, str) for weights in (BF16, FP8, FP16)]
            assert found == [topk == 3, False, False]


def test_ranks_on_cpus_have_nothing_to_agree_on() -> None:
    settings = settings_of(MODELS["deepseek-v3"], 2, 4096)
    assert forms.agree(cast(Any, None), settings, torch.device("cpu")) == ({}, {})


def test_a_users_table_replaces_the_bounds_that_it_has() -> None:
    settings = settings_of(MODELS["deepseek-v3"], 4, 1024)
    assert forms.faster(H100, settings) == {BF16: True, FP16: True, FP8: True}
    with tuning.use(Table(layers=(Bounds("bf16", 4, 256, 1),))):  # experts have 128 rows
        assert forms.faster(H100, settings) == {BF16: False, FP16: False, FP8: True}
    with tuning.use(Table(layers=(Bounds("bf16", 16, 1, 1),))):
        assert forms.faster(H100, settings) == {BF16: True, FP16: True, FP8: True}
        sixteen = settings_of(MODELS["deepseek-v3"], 16, 1024)
        assert forms.faster(H100, sixteen) == {BF16: True, FP16: True, FP8: False}


def test_forms_have_no_names() -> None:
    assert [layer.fused_or_not(given) for given in (None, False, True)] == [None, False, True]
    for wrong in ("one launch", 1, [True]):
        with pytest.raises(BadInput, match="None, True or False"):
            layer.fused_or_not(wrong)


def kind_of(settings: Settings, **others: Any) -> Kind:
    return Kind(**{**forms._of_buffer(settings), "weights": "bfloat16", "intermediate": 64, "tokens": 16, **others})


SETTINGS = Settings(2, 64, 8, 2, 16, torch.bfloat16, "lsa", None)


def test_ranks_know_what_the_table_of_the_first_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = torch.device("cuda", 0)
    mine, larger = kind_of(SETTINGS), kind_of(SETTINGS, intermediate=128)
    others = [kind_of(SETTINGS, **other) for other in ({"ranks": 4}, {"version": "0.0.9"}, {"backend": "gin"})]
    for kind in (mine, larger, *others, mine):
        tuning.keep_form("a GPU", Form(kind._asdict(), kind.intermediate == 128, {"fused": 1.0}))
    assert len(tuning.users("a GPU").forms) == 5
    _, known = forms.agree(answers(0, b""), SETTINGS, gpu)
    assert known == {mine: False, larger: True}
    first = messages.pack(forms.LayerForms([True, False, False], [(mine, True)]))
    assert forms.agree(answers(1, first), SETTINGS, gpu) == ({BF16: True, FP16: False, FP8: False}, {mine: True})
    with pytest.raises(Unsupported, match="LayerForms"):
        forms.agree(answers(1, b"nothing of this kind"), SETTINGS, gpu)


def test_a_table_keeps_all_else_and_the_last_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MOST_FORMS", 3)
    path = tuning.users_path("a GPU")
    path.write_text(json.dumps({"gpu": "a GPU", "command": "moecomm tune", "entries": []}))
    path.chmod(0o600)
    for tokens in range(5):
        tuning.keep_form("a GPU", Form(kind_of(SETTINGS, tokens=tokens)._asdict(), True, {}))
    found = json.loads(path.read_text())
    assert found["command"] == "moecomm tune" and [line["kind"]["tokens"] for line in found["forms"]] == [2, 3, 4]
    path.write_text("no table")
    with pytest.raises(ValueError, match="Expecting"):
        tuning.keep_form("a GPU", Form(kind_of(SETTINGS)._asdict(), True, {}))
    assert path.read_text() == "no table"


@pytest.mark.parametrize(
    "wrong", [{"kind": {}}, {"kind": 3}, {"kind": kind_of(SETTINGS, topk="2")._asdict()}, {"fused": 1}, {"us": 3}]
)
def test_lines_that_are_no_forms_are_refused(wrong: dict[str, Any]) -> None:
    line = Form(kind_of(SETTINGS)._asdict(), True, {}).line()
    assert tuning.parse(json.dumps({"forms": [line]})).forms[0].fused
    with pytest.raises(ValueError, match="want"):
        tuning.parse(json.dumps({"forms": [line | wrong]}))
