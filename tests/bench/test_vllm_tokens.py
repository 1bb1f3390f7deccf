"""bench/vllm_tokens.py without vLLM: weights, and how the tokens and times of ranks are compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import vllm_tokens


def experts_of(ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """The filled weights of a layer whose 8 experts are spread over ranks."""
    local = 8 // ranks
    shapes = {
        "experts.w13_weight": (torch.empty(local, 16, 32), torch.bfloat16),
        "experts.w2_weight": (torch.empty(local, 32, 8), torch.float8_e4m3fn),
        "experts.w2_weight_scale_inv": (torch.empty(local, 1, 1), torch.float32),
        "experts.w3_weight": (torch.empty(local, 16, 8), torch.uint8),
        "experts.w3_weight_scale": (torch.empty(local, 16, 1), torch.uint8),
        "experts.w13_bias": (torch.empty(local, 16), torch.float32),
        "gate.weight": (torch.empty(8, 32), torch.float32),
        "input_layernorm.weight": (torch.empty(32), torch.float32),
        "attn.k_scale": (torch.tensor(-1.0), torch.float32),
    }

    class Weights:
        def named_parameters(self) -> Any:
            return [(f"layers.0.{name}", tensor) for name, tensor in filled.items()]

    filled = {name: tensor.to(dtype) for name, (tensor, dtype) in shapes.items()}
    vllm_tokens.fill(Weights(), rank)  # type: ignore[arg-type]
    return filled


def test_weights_do_not_depend_on_the_number_of_ranks() -> None:
    alone, two = experts_of(1, 0), [experts_of(2, rank) for rank in range(2)]
    for name, whole in alone.items():
        spread = torch.cat([of[name] for of in two]) if "experts" in name else two[1][name]
        assert torch.equal(whole.view(-1).view(torch.uint8), spread.view(-1).view(torch.uint8)), name
    assert len({tuple(row.view(-1).tolist()) for row in alone["experts.w13_weight"].float()}) == 8
    scales = alone["experts.w3_weight_scale"]
    assert scales.min() >= 119 and scales.max() <= 121  # UE8M0
    assert bool(alone["experts.w2_weight"].float().isfinite().all())
    assert float(alone["attn.k_scale"]) == -1  # not a weight
    assert bool((alone["input_layernorm.weight"] == 1).all())


def test_a_prompt_counts_up_to_its_first_difference() -> None:
    first = [(1, -1.0, 0.5), (2, -1.0, 0.25), (3, -1.0, 0.125)]
    second = [(4, -2.0, 1.0), (5, -2.0, 1.0)]
    other = [(1, -1.5, 0.5), (9, -4.0, 0.25), (3, -1.0, 0.125)]
    theirs = [{"parts": {0: [first, second], 1: []}}]
    found = vllm_tokens.compared(theirs, [{"parts": {0: [other, second]}}, {"parts": {1: []}}])
    assert found == {
        "tokens": 5,
        "same": 3,
        "logprob_difference": 0.5,
        "differences": [{"rank": 0, "prompt": 0, "token": 1, "gap": 0.25}],
    }
    assert vllm_tokens.compared(theirs, theirs) == found | {"same": 5, "logprob_difference": 0.0, "differences": []}
