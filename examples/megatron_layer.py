"""Megatron-core's MoE layer with moecomm as its token dispatcher; needs megatron-core (pip install megatron-core).

    torchrun --nproc-per-node 4 examples/megatron_layer.py

The one line that moecomm needs is `use_moecomm(spec)`; the rest is Megatron's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from launched import group, installed_by, torchrun

with installed_by("pip install megatron-core"):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moecomm.integrations.megatron import use_moecomm

HIDDEN, EXPERTS = 64, 8


def build(ranks: int, **settings: Any) -> torch.nn.Module:
    """Build the layer, with EXPERTS experts over `ranks` ranks."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=96,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        **settings,
    )
    spec = use_moecomm(get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False))
    # A ModuleSpec in Megatron-core 0.16, a functools.partial in 0.18 and later.
    return spec(config=config) if isinstance(spec, functools.partial) else build_module(spec, config=config)


def step(layer: torch.nn.Module, device: str) -> torch.Tensor:
    """Run a forward and a backward pass; return the gradient of the input [sequence, batch, hidden]."""
    x = torch.randn(16, 2, HIDDEN, device=device, requires_grad=True)
    out, _ = layer(x)
    out.square().mean().backward()
    assert out.shape == x.shape and x.grad is not None
    return x.grad


def main(world: dist.ProcessGroup) -> None:
    """Run one step over the ranks of torchrun, one GPU each."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world.size())
    model_parallel_cuda_manual_seed(0)
    gradient = step(build(world.size()).cuda(), "cuda")
    print(f"rank {world.rank()}: the gradient of the input has norm {float(gradient.norm()):.4f}")


if __name__ == "__main__":
    if not torchrun():
        raise SystemExit("start it with: torchrun --nproc-per-node 4 examples/megatron_layer.py")
    with group() as ranks:
        main(ranks)
