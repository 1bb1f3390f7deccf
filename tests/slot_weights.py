"""Weights of experts, and ExpertWeights of ranks that one thread drives, filled with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import moecomm
from moecomm.testing import LocalBuffers


def drawn_weights(g: torch.Generator, experts: int, inner: int, hidden: int) -> dict[str, torch.Tensor]:
    """Draw weights and biases of experts, in bfloat16, by the names of arguments of moe()."""
    return {
        "w13": torch.randn(experts, 2 * inner, hidden, generator=g).bfloat16() / 8,
        "w2": torch.randn(experts, hidden, inner, generator=g).bfloat16() / 8,
        "w13_bias": torch.randn(experts, 2 * inner, generator=g).bfloat16(),
        "w2_bias": torch.randn(experts, hidden, generator=g).bfloat16(),
    }


def opened_weights(ranks: LocalBuffers, whole: dict[str, torch.Tensor]) -> list[moecomm.ExpertWeights]:
    """Open weights of slots on all ranks, and fill them; NaN in empty slots."""
    shapes = {name: tuple(one.shape[1:]) for name, one in whole.items()}
    found = ranks._together([partial(moecomm.ExpertWeights, buffer, shapes) for buffer in ranks.buffers])
    for buffer, weights in zip(ranks.buffers, found, strict=True):
        fill_weights(weights, whole, buffer.local_experts)
    return found


def fill_weights(weights: moecomm.ExpertWeights, whole: dict[str, torch.Tensor], experts: Sequence[int]) -> None:
    """Fill the slots of a rank with those of some experts, and NaN where that is -1."""
    held = torch.tensor(list(experts))
    for name, one in whole.items():
        slots = weights[name].fill_(torch.nan)
        slots[(held >= 0).to(slots.device)] = one[held[held >= 0]].to(slots.device)
