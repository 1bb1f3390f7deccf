"""Biases of experts: checks, and their sums with rows in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.base.arrays import as_tensor, check_tensor
from moecomm.errors import BadInput
from moecomm.rounds.rounds import Rounds

Biases = tuple[torch.Tensor | None, torch.Tensor | None]  # w13_bias and w2_bias


def check_biases(rounds: Rounds, w13_bias: Any, w2_bias: Any, intermediate: int) -> Biases:
    """Return the biases of Buffer.moe as tensors.  Raises BadInput."""
    local = len(rounds.local_experts)
    return (
        _checked(rounds, "w13_bias", w13_bias, (local, 2 * intermediate)),
        _checked(rounds, "w2_bias", w2_bias, (local, rounds.hidden)),
    )


def _checked(rounds: Rounds, argument: str, given: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    if given is None:
        return None
    bias = as_tensor(argument, given)[0]
    check_tensor(argument, bias, device=rounds.device, dtypes=(rounds.dtype, torch.float32), shape=shape)
    if not bias.is_contiguous():
        raise BadInput(argument, f"strides {bias.stride()}", "a contiguous tensor")
    return bias


def group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return int32 `[rows]`: the group of each row; for rows after the last group, the number of groups.

    Args:
        ends: int32 `[groups]`: end of each group and begin of the next.
        rows: number of rows.
    """
    places = torch.arange(rows, dtype=torch.int32, device=ends.device)
    return torch.searchsorted(ends, places, right=True, out_int32=True)


def add_bias(rows: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """Add the bias of each row's group, in float32, rounded once.  Rows after the last group keep their values.

    Gradients: rows and bias.

    Args:
        rows: `[rows, N]`.
        bias: `[groups, N]`; None: return the rows as they are.
        ends: see group_of_rows.
    """
    if bias is None:
        return rows
    biases = torch.cat((bias.float(), bias.new_zeros(1, bias.shape[1], dtype=torch.float32)))
    return (rows.float() + biases[group_of_rows(ends, len(rows))]).to(rows.dtype)
