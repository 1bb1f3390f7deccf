"""Gradients of a weighted combine with respect to y and to the weights; on a GPU one pass over the rows."""

from __future__ import annotations

import torch

from moecomm.base import tangents
from moecomm.gpu import row_pass
from moecomm.ops.operator import operator
from moecomm.ops.rounds import rows_of


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
        rows, row_weights, y = rows_of(rows), row_weights.contiguous(), None if y is None else rows_of(y)
        grad, grad_weights = torch.empty_like(rows), row_weights.new_empty((0,) if y is None else row_weights.shape)
        if (count := row_weights.numel()) > 0:
            row_pass.run(
                row_pass.kernel("combine_gradients", row_pass.TYPES[dtype]),
                rows.device,
                count * row_pass.ROW,
                rows=rows.data_ptr(),
                y=row_pass.address(y),
                weights=row_weights.data_ptr(),
                to_y=grad.data_ptr(),
                to_weights=grad_weights.data_ptr(),
                count=count,
                hidden=rows.shape[-1],
            )
        return grad, grad_weights
    grad = (rows.float() * row_weights.unsqueeze(-1)).to(dtype)
    return grad, row_weights.new_empty(0) if y is None else (y.float() * rows.float()).sum(dim=-1)


@combine_gradients.register_fake
def _(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape, dtype=dtype), row_weights.new_empty((0,) if y is None else row_weights.shape)
