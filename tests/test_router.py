"""Routers against the published formulas, written out token by token in Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from moecomm.errors import BadInput
from moecomm.router import MODELS, Router, random_routing, router


def logits_of(gate: Router, x: torch.Tensor) -> list[list[float]]:
    return torch.nn.functional.linear(x.float(), gate.weight).tolist()


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    powers = [math.exp(v - top) for v in row]
    return [p / sum(powers) for p in powers]


def deepseek_v3(row: list[float], bias: list[float]) -> dict[int, float]:
    """{expert: weight} of one token: sigmoid, 4 of 8 groups by their two best biased scores, top-8, sum 2.5."""
    scores = [1 / (1 + math.exp(-v)) for v in row]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = [sum(sorted(biased[g * 32 : (g + 1) * 32])[-2:]) for g in range(8)]
    kept = sorted(range(8), key=lambda g: -groups[g])[:4]
    chosen = sorted((e for e in range(256) if e // 32 in kept), key=lambda e: -biased[e])[:8]
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total * 2.5 for e in chosen}


def as_dicts(topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> list[dict[int, float]]:
    assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
    return [dict(zip(i, w, strict=True)) for i, w in zip(topk_idx.tolist(), topk_weights.tolist(), strict=True)]


def test_deepseek_v3_chooses_and_weighs_as_published() -> None:
    gate = router("deepseek-v3", seed=3)
    gate.bias = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 0.1  # large enough to change the choice
    x = torch.randn(64, 7168, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    got = as_dicts(*gate(x))
    want = [deepseek_v3(row, gate.bias.tolist()) for row in logits_of(gate, x)]
    assert [list(token) for token in got] == [list(token) for token in want]
    for token, expected in zip(got, want, strict=True):
        assert token == pytest.approx(expected, rel=1e-5)
        assert sum(token.values()) == pytest.approx(2.5, rel=1e-6)
        assert len({expert // 32 for expert in token}) <= 4


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    plain = Router(16, 8, 2, gate="sigmoid", normalize=False)
    lifted = Router(16, 8, 2, gate="sigmoid", normalize=False, bias=torch.tensor([0.0] * 7 + [5.0]))
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    topk_idx, weights = lifted(x)
    assert (topk_idx[:, 0] == 7).all()
    scores = torch.nn.functional.linear(x, plain.weight).sigmoid()
    assert torch.equal(weights, scores.gather(1, topk_idx))


def test_qwen3_is_a_normalised_softmax() -> None:
    gate = router("qwen3-235b", seed=1)
    x = torch.randn(16, 4096, generator=torch.Generator().manual_seed(2))
    for token, row in zip(as_dicts(*gate(x)), logits_of(gate, x), strict=True):
        scores = softmax(row)
        chosen = sorted(range(128), key=lambda e: -scores[e])[:8]
        total = sum(scores[e] for e in chosen)
        assert list(token) == chosen
        assert token == pytest.approx({e: scores[e] / total for e in chosen}, rel=1e-5)


def test_mixtral_is_a_softmax_over_its_two_best() -> None:
    gate = router("mixtral-8x7b", seed=1)
    x = torch.randn(16, 4096, generator=torch.Generator().manual_seed(2))
    for token, row in zip(as_dicts(*gate(x)), logits_of(gate, x), strict=True):
        chosen = sorted(range(8), key=lambda e: -row[e])[:2]
        weights = softmax([row[e] for e in chosen])
        assert list(token) == chosen
        assert token == pytest.approx(dict(zip(chosen, weights, strict=True)), rel=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    gate = router("deepseek-v3")
    gate.bias = None
    topk_idx, weights = gate(torch.zeros(3, 7168))
    assert topk_idx.tolist() == [list(range(8))] * 3
    assert torch.allclose(weights, torch.full((3, 8), 2.5 / 8))


@pytest.mark.parametrize("model", MODELS)
def test_no_tokens_give_no_routing(model: str) -> None:
    gate = router(model)
    topk_idx, weights = gate(torch.empty(0, gate.hidden, dtype=torch.bfloat16))
    assert topk_idx.shape == weights.shape == (0, gate.topk)
    assert random_routing(0, gate.num_experts, gate.topk)[0].shape == (0, gate.topk)


def test_weights_come_from_the_seed() -> None:
    assert torch.equal(router("qwen3-235b", seed=5).weight, router("qwen3-235b", seed=5).weight)
    assert not torch.equal(router("qwen3-235b", seed=5).weight, router("qwen3-235b", seed=6).weight)
    assert router("qwen3-235b", dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_shapes_of_the_models() -> None:
    shapes = {name: (m.hidden, m.intermediate, m.num_experts, m.topk) for name, m in MODELS.items()}
    assert shapes == {
        "deepseek-v3": (7168, 2048, 256, 8),
        "kimi-k2": (7168, 2048, 384, 8),
        "qwen3-235b": (4096, 1536, 128, 8),
        "qwen3-30b-a3b": (2048, 768, 128, 8),
        "gpt-oss-120b": (2880, 2880, 128, 4),
        "mixtral-8x7b": (4096, 14336, 8, 2),
    }


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("gate", {"gate": "tanh"}),
        ("num_groups", {"num_groups": 3}),
        ("topk_groups", {"num_groups": 4, "topk_groups": 5}),
        ("topk", {"num_groups": 4, "topk_groups": 1, "topk": 3}),
        ("bias", {"bias": torch.zeros(7)}),
    ],
)
def test_bad_input_names_the_argument(argument: str, values: dict) -> None:
    with pytest.raises(BadInput) as caught:
        Router(**{"hidden": 16, "num_experts": 8, "topk": 2, **values})
    assert caught.value.argument == argument


def test_an_unknown_model_is_bad_input() -> None:
    with pytest.raises(BadInput, match="gpt-5"):
        router("gpt-5")


def test_random_routing_has_distinct_experts_and_weights_that_sum_to_one() -> None:
    topk_idx, weights = random_routing(500, 12, 12, generator=torch.Generator().manual_seed(4))
    assert torch.equal(topk_idx.sort(dim=1).values, torch.arange(12).expand(500, 12))
    assert torch.allclose(weights.sum(dim=1), torch.ones(500))
    again = random_routing(500, 12, 12, generator=torch.Generator().manual_seed(4))
    assert torch.equal(again[0], topk_idx) and torch.equal(again[1], weights)


def test_skew_sends_tokens_to_one_rank() -> None:
    topk_idx, _ = random_routing(2000, 64, 4, ranks=8, skew=0.7, generator=torch.Generator().manual_seed(1))
    on_rank = torch.stack([((topk_idx // 8) == rank).all(dim=1) for rank in range(8)], dim=1).sum(dim=0)
    assert 1300 < on_rank.max() < 1500  # 0.7 * 2000, plus the few that end there by chance
    assert on_rank.sum() - on_rank.max() < 20
    # Where a rank has fewer experts than a token wants, all of them are wanted, and then others.
    topk_idx, _ = random_routing(50, 64, 10, ranks=8, skew=1.0)
    here = torch.stack([((topk_idx // 8) == rank).sum(dim=1) for rank in range(8)], dim=1)
    assert here.max(dim=1).values.tolist() == [8] * 50 and len(here.argmax(dim=1).unique()) == 1


def test_drop_and_duplicates() -> None:
    topk_idx, _ = random_routing(4000, 4, 8, drop=0.25, duplicates=True, generator=torch.Generator().manual_seed(1))
    assert 0.23 < (topk_idx == -1).float().mean() < 0.27
    kept = topk_idx[topk_idx >= 0]
    assert (torch.bincount(kept, minlength=4) / len(kept) - 0.25).abs().max() < 0.02
    assert (random_routing(100, 4, 4, drop=1.0)[0] == -1).all()
    with pytest.raises(BadInput, match="topk"):
        random_routing(1, 4, 5)
