"""bench/sglang_tokens.py without SGLang: the checkpoint, how experts are compared, and what a run must have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import sglang_tokens


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    pytest.importorskip("safetensors.torch", reason="needs safetensors, for the checkpoint")
    for name, value in {"HIDDEN": 32, "INTERMEDIATE": 16, "VOCABULARY": 8, "HEADS": 2, "HEAD_DIM": 8}.items():
        monkeypatch.setattr(sglang_tokens, name, value)
    sglang_tokens.write_model(tmp_path)
    return tmp_path


def test_a_checkpoint_has_the_sizes_of_its_configuration(small: Path) -> None:
    from safetensors.torch import load_file

    config = json.loads((small / "config.json").read_text())
    weights = load_file(small / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.1.mlp.gate.weight"].shape == (config["num_experts"], config["hidden_size"])
    assert weights["model.layers.0.mlp.experts.15.down_proj.weight"].shape == (32, config["moe_intermediate_size"])
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)


class Layer(torch.nn.Module):
    """Experts as a layer of SGLang has them; `wrong` leaves one of a token's experts out."""

    def __init__(self, weights: dict[str, torch.Tensor], layer: int, wrong: bool) -> None:
        super().__init__()
        self.weights, self.layer, self.wrong = weights, layer, wrong

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        out = torch.zeros(hidden_states.shape)
        for token, x in enumerate(hidden_states.float()):
            for k in range(int(self.wrong), topk_output.topk_ids.shape[1]):
                at = f"model.layers.{self.layer}.mlp.experts.{topk_output.topk_ids[token, k]}."
                gate, up, down = (self.weights[f"{at}{name}_proj.weight"].float() for name in ("gate", "up", "down"))
                y = (torch.nn.functional.silu(gate @ x) * (up @ x)) @ down.T
                out[token] += topk_output.topk_weights[token, k] * y
        hidden_states.zero_()  # as SGLang, which frees them
        return out.bfloat16()


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_are_compared_with_the_checkpoint(monkeypatch: pytest.MonkeyPatch, small: Path, wrong: bool) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    stand_in = ModuleType("sglang.srt.layers.moe.fused_moe_triton.layer")
    stand_in.FusedMoE = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    weights = load_file(small / "model.safetensors")
    model = torch.nn.ModuleList([Layer(weights, layer, wrong and layer == 1) for layer in range(2)])
    found = sglang_tokens.Experts(model, str(small))
    generator = torch.Generator().manual_seed(1)
    for layer, tokens in enumerate((3, 5)):
        x = torch.randn(tokens, 32, generator=generator).bfloat16()
        ids = torch.rand(tokens, 16, generator=generator).argsort(1)[:, :4]
        topk = SimpleNamespace(topk_ids=ids, topk_weights=torch.rand(tokens, 4, generator=generator))
        model[layer](hidden_states=x, topk_output=topk)
    model[0](torch.zeros(0, 32).bfloat16(), SimpleNamespace(topk_ids=ids[:0], topk_weights=torch.zeros(0, 4)))
    assert found.calls == 3
    assert (found.error > sglang_tokens.EXPERTS) is wrong


GOOD: dict[str, Any] = {"run": "auto", "calls": dict.fromkeys(sglang_tokens.METHODS, 2), "expert_calls": 4}
GOOD |= {"expert_error": 0.005, "logit_error": {"p50": 0.01, "max": 0.5}}


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"calls": {"dispatch": 2, "combine": 2}}, False),  # no step was decoded in low latency
        ({"expert_error": 0.1}, False),
        ({"expert_calls": 0}, False),
        ({"logit_error": {"p50": 0.2, "max": 0.5}}, False),
        ({"run": "normal", "calls": {"dispatch": 2, "combine": 2}}, True),
        ({"run": "none"}, False),  # went over moecomm
        ({"run": "none", "calls": {}}, True),
        ({"run": "dispatchers", "bits": {"normal 33": True, "low_latency 33": False}}, False),
    ],
)
def test_a_run_must_go_over_moecomm_and_have_the_same_experts(changed: dict[str, Any], good: bool) -> None:
    assert sglang_tokens.judged(GOOD | changed) is good


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_share_the_captured_requests_evenly(ranks: int) -> None:
    captured = sglang_tokens.captured_requests(ranks)
    assert captured % ranks == 0 and captured >= len(sglang_tokens.PROMPTS)
