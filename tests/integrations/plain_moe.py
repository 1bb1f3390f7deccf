"""A mixture of experts in plain torch, in integers: sums are exact in any order, so that results have to be equal."""

from __future__ import annotations

import math
from typing import Any

import torch

from moecomm.router import random_routing

RANKS, HIDDEN, EXPERTS, TOPK, TOKENS = 4, 16, 8, 3, 9


class Tokens:
    """Integers, whose sums are exact in any order: tokens, scores, ids, weights of all experts, a factor of outputs."""

    def __init__(self, rank: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(rank)
        self.x = torch.randint(-4, 5, (tokens, HIDDEN), generator=g).to(dtype).requires_grad_()
        self.ids, _ = random_routing(tokens, EXPERTS, TOPK, generator=g)
        self.scores = torch.randint(1, 5, (tokens, TOPK), generator=g).float().requires_grad_()
        self.seen = torch.randint(-2, 3, (tokens, HIDDEN), generator=g).to(dtype)

    def counts(self) -> torch.Tensor:
        return torch.bincount(self.ids.flatten(), minlength=EXPERTS)

    def given(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.scores, self.ids, self.counts()


def weights_of(experts: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    every = torch.randint(-2, 3, (EXPERTS, HIDDEN, HIDDEN), generator=g).to(dtype)
    return every[experts].clone().requires_grad_()


def experts(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Linear experts over as many rows as their counts say; NaN behind those, which nobody may read."""
    assert counts.sum() <= len(rows)
    parts = rows[: int(counts.sum())].split(counts.tolist())
    done = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    return torch.cat([done, rows.new_full((len(rows) - len(done), HIDDEN), math.nan)])


def wanted(tokens: Tokens, weights: torch.Tensor) -> list[torch.Tensor]:
    """The same of one rank's tokens with all experts, in plain torch; adds to weights.grad."""
    x, scores = tokens.x.detach().requires_grad_(), tokens.scores.detach().requires_grad_()
    y = torch.einsum("th,tkhi->tki", x, weights[tokens.ids])
    out = (y * scores.unsqueeze(2)).sum(1)
    (out * tokens.seen).sum().backward()
    assert x.grad is not None and scores.grad is not None
    return [out.detach(), x.grad, scores.grad]


def wanted_of_weights(ranks: int = RANKS) -> torch.Tensor:
    """The gradient of the weights of all experts, by the tokens of all ranks."""
    every = weights_of(slice(None))
    for rank in range(ranks):
        wanted(Tokens(rank), every)
    assert every.grad is not None
    return every.grad
