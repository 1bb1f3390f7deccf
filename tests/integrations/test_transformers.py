"""A small model of Hugging Face transformers with its experts distributed over CPU ranks, against the same on one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers, installed: python -m tests.integrations.versions transformers",
)
PROMPTS = 4, 7  # and their tokens


def model_of(folder: Path, **how: Any) -> Any:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager", **how)


def make(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        decoder_sparse_step=1,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def prompts() -> torch.Tensor:
    return torch.randint(0, 64, PROMPTS, generator=torch.Generator().manual_seed(1))


def _same(rank: int, group: Any, folder: Path) -> tuple[float, bool, float]:
    """How far logits are off, whether the tokens that follow are the same, and how far the gradient is off."""
    from transformers.distributed import DistributedConfig

    from moecomm.integrations.transformers import ExpertParallel, register

    register()
    ranks = group.size()
    how = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="moecomm")
    ours, theirs = model_of(folder, distributed_config=how), model_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        call = ExpertParallel.__call__
        patch.setattr(ExpertParallel, "__call__", lambda *given: (calls.append(1), call(*given))[1])
        ids = prompts()
        with torch.no_grad():
            found, want = ours(ids).logits, theirs(ids).logits
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        same = torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
        for model in (ours, theirs):
            model(ids, labels=ids).loss.backward()
        assert len(calls) == 2 * (1 + 6 + 1)
    grads = [model.model.layers[0].mlp.gate.weight.grad for model in (ours, theirs)]
    error = float((found - want).abs().max() / want.abs().max())
    return error, same, float((grads[0] - grads[1]).abs().max() / grads[1].abs().max())


def test_logits_tokens_and_gradients_are_those_of_one_rank(ranks: Any, tmp_path: Path) -> None:
    make(tmp_path)
    ranks.start(2, _same, tmp_path)
    for result in ranks.results(2, timeout_s=240).values():
        assert not isinstance(result, BaseException), result
        error, same, gradient = result
        assert error < 1e-5 and same and gradient < 1e-5, result
