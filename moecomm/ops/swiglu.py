"""Elementwise gradients of gated experts, between the backward pass's grouped GEMMs; on GPUs one pass for SwiGLU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import silu

from moecomm.fused.activations import FORMULAS, SWIGLU, UNLIMITED, GatedActivation
from moecomm.gpu import plain_kernel, row_pass
from moecomm.ops.rounds import rows_of


class Gradients(NamedTuple):
    """Results of `gradients`.

    Attributes:
        both: gradient of `both`, `[rows, 2 I]`.
        weights: gradient of the weights, float32 `[rows]`.
        inner: weight * activation(gate, up), `[rows, I]`, which the gradient of w2 needs.
    """

    both: torch.Tensor
    weights: torch.Tensor
    inner: torch.Tensor


def kernel(dtype: torch.dtype, activation: GatedActivation) -> plain_kernel.PlainKernel:
    """Return the kernel of gradients of SwiGLU, with the activation's kind of limit."""
    bounded = "silu" if FORMULAS[activation.name].limits_activated else "gate"
    limited = "nothing" if activation.limit == UNLIMITED else bounded
    return row_pass.kernel("swiglu_gradients", row_pass.TYPES[dtype], f"Limited::{limited}")


def gradients(
    both: torch.Tensor,
    grad_inner: torch.Tensor,
    weights: torch.Tensor,
    width: int,
    end: torch.Tensor,
    activation: GatedActivation = SWIGLU,
) -> Gradients:
    """Compute gradients of out = sum of weight * w2 activation(gate, up), in float32 and rounded once.

    Args:
        both: `[rows, 2 I]`: `width` gate columns, then `width` up columns, and so on; I and width columns are multiples
            of 16 bytes.
        grad_inner: `[rows, I]` of the same dtype: gradient of activation(gate, up), not multiplied by the weight.
        weights: float32 `[rows]`.
        width: I, or the granularity of interleaved weights.
        end: int32 `[1]`: rows from this one on may hold anything, in inputs and outputs.
        activation: of the experts.
    """
    if both.is_cuda and FORMULAS[activation.name].of is silu:
        both, grad_inner, weights = rows_of(both), rows_of(grad_inner), weights.contiguous()
        made = Gradients(torch.empty_like(both), torch.empty_like(weights), torch.empty_like(grad_inner))
        count, columns = grad_inner.shape
        if count > 0:
            row_pass.run(
                kernel(both.dtype, activation),
                both.device,
                count * row_pass.ROW,
                both=both.data_ptr(),
                inner=grad_inner.data_ptr(),
                weights=weights.data_ptr(),
                to_both=made.both.data_ptr(),
                to_inner=made.inner.data_ptr(),
                to_weights=made.weights.data_ptr(),
                end=end.data_ptr(),
                count=count,
                columns=columns,
                width=width,
                limit=activation.limit,
            )
        return made
    gate, up = both.float().view(len(both), both.shape[1] // (2 * width), 2, width).unbind(2)
    values, by_gate, by_up = activation.derivatives(gate, up)
    inner, grad, scale = values.flatten(1), grad_inner.float(), weights.unsqueeze(1)
    grad_weights = (inner * grad).sum(dim=1)
    grad_h = (grad * scale).view(gate.shape)
    grad_both = torch.stack((grad_h * by_gate, grad_h * by_up), dim=2)
    return Gradients(grad_both.flatten(1).to(both.dtype), grad_weights, (inner * scale).to(both.dtype))
