"""Gradients of a weighted combine with respect to y and to the weights; on a GPU one pass over the rows."""

from __future__ import annotations

import ctypes

import torch

from moecomm.base import tangents
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import fields_of
from moecomm.ops.operator import operator
from moecomm.ops.rounds import rows_of


class _Args(ctypes.Structure):
    """GradientArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("GradientArgs")


def kernel(dtype: torch.dtype) -> plain_kernel.PlainKernel:
    """Return the kernel for rows and y of `dtype`."""
    entry = f"combine_gradients<Type::{row_pass.TYPES[dtype]}>"
    return row_pass.kernel("elementwise/gradients", entry, "GradientArgs")


@operator("combine_gradients")
def combine_gradients(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of y and of the weights of a combine.

    Args:
        rows: `[..., H]`, the gradient of the token of each row of y.
        row_weights: float32 `[...]`.
        y: `[..., H]` of `dtype`; None: do not compute the gradient of the weights.
        dtype: of the gradient of y.

    Returns:
        The gradient of y, `[..., H]` of `dtype`, and of the weights, float32 `[...]`, or `[0]` without y.
    """
    tangents.refuse("moecomm::combine_gradients", rows, row_weights, y)
    if rows.is_cuda and rows.dtype is dtype:
        return by_kernel(rows, row_weights, y)
    grad = (rows.float() * row_weights.unsqueeze(-1)).to(dtype)
    return grad, row_weights.new_empty(0) if y is None else (y.float() * rows.float()).sum(dim=-1)


@combine_gradients.register_fake
def _(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape, dtype=dtype), row_weights.new_empty((0,) if y is None else row_weights.shape)


def by_kernel(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute combine_gradients with the kernel, on a GPU, for rows and y of one dtype."""
    rows, row_weights = rows_of(rows), row_weights.contiguous()
    grad, grad_weights = torch.empty_like(rows), row_weights.new_empty((0,) if y is None else row_weights.shape)
    if (count := row_weights.numel()) == 0:
        return grad, grad_weights
    y = None if y is None else rows_of(y)
    args = _Args(*map(row_pass.address, (rows, y, row_weights, grad, grad_weights)), count, rows.shape[-1])
    row_pass.launch(kernel(rows.dtype), rows.device, count * row_pass.ROW, args)
    return grad, grad_weights
