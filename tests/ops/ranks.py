"""Tokens and routing of ranks, each of which makes operators' rounds on a thread of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import moecomm
from moecomm.router import random_routing


@dataclass
class Case:
    """Tokens and routing of every rank: ragged, none at one rank, -1 entries, the same expert twice."""

    ranks: int
    hidden: int
    num_experts: int
    topk: int
    max_tokens: int
    dtype: torch.dtype
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    def buffer(self, group: Any, **settings: Any) -> moecomm.Buffer:
        sizes = {name: getattr(self, name) for name in ("hidden", "num_experts", "topk", "max_tokens", "dtype")}
        return moecomm.Buffer(group, **sizes, backend="host", **settings)

    def drawn(self, shape: torch.Size, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


def case(
    ranks: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, exact: bool = False, hidden: int = 24
) -> Case:
    """exact: small integers, whose sums and products have no rounding in float32."""
    g = torch.Generator().manual_seed(seed)
    num_experts, topk, max_tokens = 4 * ranks, 3, 9
    tokens = [(0, 9, 4, 7)[(rank + seed) % 4] for rank in range(ranks)]
    routing = [random_routing(t, num_experts, topk, drop=0.2, duplicates=True, generator=g) for t in tokens]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=g).float() if exact else torch.randn(shape, generator=g)

    x = [draw(t, hidden).to(dtype) for t in tokens]
    weights = [draw(t, topk) if exact else w for t, (_, w) in zip(tokens, routing, strict=True)]
    return Case(ranks, hidden, num_experts, topk, max_tokens, dtype, x, [idx for idx, _ in routing], weights)
