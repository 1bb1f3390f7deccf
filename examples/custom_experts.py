"""Custom experts between dispatch and combine, with gradients.

    python examples/custom_experts.py
    torchrun --nproc-per-node 4 examples/custom_experts.py

Each expert here is a low-rank layer with a bias, which moecomm's fused layers do not offer.
"""

from __future__ import annotations

from typing import Any

import torch
from launched import group
from torch.nn.functional import gelu

import moecomm

HIDDEN, RANK, EXPERTS, TOPK, TOKENS = 64, 8, 8, 2, 32


class LowRankExperts(torch.nn.Module):
    """The experts of this rank: `up @ gelu(down @ x) + bias`."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()

        def drawn(expert: int, *shape: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(expert)
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        experts = range(first, first + count)
        self.down = torch.nn.Parameter(torch.stack([drawn(e, RANK, HIDDEN) for e in experts]))
        self.up = torch.nn.Parameter(torch.stack([drawn(e + 1000, HIDDEN, RANK) for e in experts]))
        self.bias = torch.nn.Parameter(torch.stack([drawn(e + 2000, HIDDEN) for e in experts]))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply the experts to `rows`, which are grouped by expert with `counts` rows each.

        Rows behind the last group give zeros.
        """
        parts, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            x = rows[start : start + count]
            parts.append(gelu(x @ self.down[expert].T) @ self.up[expert].T + self.bias[expert])
            start += count
        return torch.cat([*parts, torch.zeros_like(rows[start:])])


def layer(
    buffer: moecomm.Buffer,
    experts: LowRankExperts,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over k of w_k * expert_k(x), `[T, H]`."""
    routed = moecomm.ops.dispatch(buffer, x, topk_idx, topk_weights)
    return moecomm.ops.combine(experts(routed.x, routed.tokens_per_expert), routed.handle)


def main(ranks: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one forward and one backward pass; return this rank's output and the gradient of its tokens."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    with moecomm.Buffer(ranks, **sizes, dtype=torch.float32) as buffer:
        local = EXPERTS // buffer.num_ranks
        experts = LowRankExperts(buffer.rank * local, local).to(buffer.device)
        generator = torch.Generator().manual_seed(buffer.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(buffer.device).requires_grad_()
        topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices.to(buffer.device)
        topk_weights = torch.full((TOKENS, TOPK), 1 / TOPK, device=buffer.device)
        out = layer(buffer, experts, x, topk_idx, topk_weights)
        out.square().mean().backward()
        assert x.grad is not None and experts.bias.grad is not None
        print(f"rank {buffer.rank}: mean square {float(out.detach().square().mean()):.4f}")
        return out.detach().cpu(), x.grad.cpu()


if __name__ == "__main__":
    with group() as ranks:
        main(ranks)
