"""Layers of models' sizes, of 8 ranks that share a GPU: as many as few machines have GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.fused import quantize_weights
from moecomm.router import MODELS, Model, random_routing
from moecomm.testing import LocalBuffers

RANKS = 8
TOKENS = {"deepseek-v3": 512, "qwen3-235b": 128, "gpt-oss-120b": 1024, "mixtral-8x7b": 512, "qwen3-30b-a3b": 2048}


def calls_of(model: Model, tokens: int) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    def weights(*shape: int) -> torch.Tensor:
        return randn(model.num_experts // RANKS, *shape).mul_(shape[-1] ** -0.5)

    calls = []
    for _ in range(RANKS):
        ids, of_ids = random_routing(tokens, model.num_experts, model.topk, generator=generator)
        w13, w2 = weights(2 * model.intermediate, model.hidden), weights(model.hidden, model.intermediate)
        routing = {"topk_idx": ids, "topk_weights": of_ids}
        calls.append({"x": randn(tokens, model.hidden), "w13": w13, "w2": w2} | routing)
    return calls


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOKENS)
def test_a_fused_layer_has_the_bits_of_dispatch_and_combine(name: str) -> None:
    model, tokens = MODELS[name], TOKENS[name]
    sizes = {"hidden": model.hidden, "num_experts": model.num_experts, "topk": model.topk, "max_tokens": tokens}
    with LocalBuffers(RANKS, **sizes, dtype=torch.bfloat16, backend="lsa", device=0, timeout_s=60) as ranks:
        calls = calls_of(model, tokens)
        quantized = [call | {w: quantize_weights(call[w]) for w in ("w13", "w2")} for call in calls]
        for given in (calls, quantized):
            apart = ranks.moe([call | {"fused": False} for call in given])
            ranks.check()
            assert all(bool(out.isfinite().all()) and bool(out.any()) for out in apart)
            for _ in range(5):
                one = ranks.moe([call | {"fused": True} for call in given])
                ranks.check()
                for rank, (out, other) in enumerate(zip(one, apart, strict=True)):
                    assert torch.equal(out, other), rank
