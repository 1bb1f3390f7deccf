"""Differentiable grouped GEMMs: rows are grouped by expert, and each group has its own matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from moecomm.base import tangents
from moecomm.ops.operator import operator


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight[g].T` for the rows of each group g.

    Args:
        x: `[rows, n]`.
        weight: `[groups, m, n]` of the same dtype; on GPUs bfloat16 or another dtype that torch's grouped_mm supports.
        ends: int32 `[groups]`: end of each group and begin of the next.

    Returns:
        `[rows, m]`; rows after the last group are undefined, have no gradient and contribute to none.
    """
    if x.is_cuda:
        return grouped_mm(x, weight.transpose(1, 2), offs=ends)
    tangents.refuse("moecomm::grouped_linear", x, weight)
    # torch's grouped_mm takes every dtype on CPUs, but only bfloat16 in graphs.
    out: torch.Tensor = _linear(x, weight, ends)
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute `left.T @ right` over the rows of each group: the gradient of grouped_linear's weight.

    Args:
        left: `[rows, m]`, of a dtype that grouped_linear supports.
        right: `[rows, n]`, of the same dtype.
        ends: int32 `[groups]`, as in grouped_linear.

    Returns:
        `[groups, m, n]`; rows after the last group contribute to none.
    """
    if left.is_cuda:
        return grouped_mm(left.T, right, offs=ends)
    tangents.refuse("moecomm::grouped_outer", left, right)
    out: torch.Tensor = _outer(left, right, ends)
    return out


@operator("grouped_linear")
def _linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    tangents.refuse("moecomm::grouped_linear", x, weight)
    out = x.new_empty(x.shape[0], weight.shape[1])
    begin = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        torch.mm(x[begin:end], matrix.T, out=out[begin:end])
        begin = end
    out[begin:] = 0
    return out


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@operator("grouped_outer")
def _outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    tangents.refuse("moecomm::grouped_outer", left, right)
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    begin = 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        torch.mm(left[begin:end].T, right[begin:end], out=matrix)
        begin = end
    return out


@_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    return (
        _linear(grad, weight.transpose(1, 2), ends) if wants_x else None,
        _outer(grad, x, ends) if wants_weight else None,
        None,
    )


def _outer_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    return _linear(right, grad, ends), _linear(left, grad.transpose(1, 2), ends), None


_linear.register_autograd(_linear_backward, setup_context=_keep)
_outer.register_autograd(_outer_backward, setup_context=_keep)
