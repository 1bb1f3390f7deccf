"""An expert layer as vLLM runs it, over moecomm's prepare and finalize; needs vLLM (pip install vllm).

    torchrun --nproc-per-node 4 examples/vllm_layer.py

A vLLM deployment needs none of this code: a plugin puts these classes behind `--all2all-backend
deepep_high_throughput`. The example shows the steps inside: prepare() dispatches tokens and returns rows with their
experts, kernels of vLLM compute, and finalize() applies the routing weights and combines.
"""

from __future__ import annotations

from typing import Any

import torch
from launched import group, installed_by, torchrun

HIDDEN, EXPERTS, TOPK, TOKENS = 128, 8, 2, 12
INSTALL = "pip install vllm"


def experts(x: torch.Tensor, ids: torch.Tensor, first: int, local: int) -> torch.Tensor:
    """Stand in for vLLM's kernels, `[rows, K, H]`: expert e multiplies by e + 1; ids of other ranks give zeros."""
    mine = (ids >= first) & (ids < first + local)
    return x.unsqueeze(1) * torch.where(mine, ids + 1, 0).unsqueeze(2).to(x.dtype)


def layer(ranks: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, quantization: Any) -> torch.Tensor:
    """Return the sum over k of w_k * expert_k(x), `[T, H]`.

    `ranks` is a process group, or a rank of moecomm.local_ranks().
    """
    with installed_by(INSTALL):
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

        from moecomm.integrations.vllm.managers import StandardManager
        from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

    rank, num_ranks = (ranks.rank(), ranks.size()) if callable(ranks.rank) else (ranks.rank, ranks.ranks)
    local = EXPERTS // num_ranks
    manager = StandardManager(ranks, None)
    steps = StandardPrepareAndFinalize(
        manager.get_handle({}), num_dispatchers=num_ranks, dp_size=num_ranks, rank_expert_offset=rank * local
    )
    rows, _, _, row_ids, row_weights = steps.prepare(x, weights, ids, EXPERTS, None, False, quantization)
    y = experts(rows, row_ids, rank * local, local)
    out = torch.empty_like(x)
    steps.finalize(out, y, row_weights, row_ids, False, TopKWeightAndReduceDelegate())
    manager.destroy()
    return out


def main(ranks: Any) -> None:
    """Run and check one layer over the ranks of torchrun."""
    with installed_by(INSTALL):
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(TOKENS, HIDDEN, device=device)
    ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK).indices
    weights = torch.full((TOKENS, TOPK), 1 / TOPK, device=device)
    out = layer(ranks, x, ids, weights, FusedMoEQuantConfig.make())
    torch.testing.assert_close(out, x * ((ids + 1) * weights).sum(dim=1, keepdim=True))
    print("the layer computes what it should")


if __name__ == "__main__":
    if not torchrun():
        raise SystemExit("start it with: torchrun --nproc-per-node 4 examples/vllm_layer.py")
    with group() as ranks:
        main(ranks)
