"""What autograd does with the operators.

Rows go back the way they came: the gradient of a dispatch is a combine without weights, which brings the gradients of
the weights home beside the rows; the gradient of a combine is a dispatch with the same handle, and a product.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moecomm import names
from moecomm.errors import Unsupported
from moecomm.ops import rounds


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, _, ctx.buffer, ctx.layout, *_ = inputs
    rows, *_, memory = output
    ctx.num_tokens, ctx.max_rows = x.shape[0], math.prod(rows.shape[:-1])
    ctx.save_for_backward(memory)


def _dispatch_backward(ctx: Any, grad_x: torch.Tensor, grad_weights: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    (memory,) = ctx.saved_tensors
    weighted = ctx.needs_input_grad[2]  # alike on all ranks, as their models are
    x, weights = rounds.dispatch_backward(
        grad_x, grad_weights if weighted else None, memory, ctx.buffer, ctx.layout, ctx.max_rows, ctx.num_tokens
    )
    return x, None, weights if weighted else None, None, None, None, None, None


def _keep_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, memory, ctx.buffer, ctx.layout, ctx.max_rows, _ = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(memory)


def _dispatch_again_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (memory,) = ctx.saved_tensors
    x, _ = rounds.dispatch_backward(grad, None, memory, ctx.buffer, ctx.layout, ctx.max_rows, ctx.num_tokens)
    return x, None, None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, row_weights, memory, ctx.buffer, ctx.layout, ctx.max_rows, _, _, ctx.zero_padding = inputs
    ctx.dtype = y.dtype
    # y is wanted for the gradient of the weights alone.
    weights_alone = ctx.needs_input_grad[1]
    ctx.save_for_backward(memory, row_weights, y if weights_alone else None)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    memory, row_weights, y = ctx.saved_tensors
    sent = grad.to(names.find(ctx.buffer).dtype)
    rows = rounds.dispatch_again(sent, memory, ctx.buffer, ctx.layout, ctx.max_rows, ctx.zero_padding)
    grad_y, grad_weights = rows, None
    if row_weights is not None:
        grad_y = rows.float() * row_weights.unsqueeze(-1)
    if y is not None:
        grad_weights = (y.float() * rows.float()).sum(dim=-1)
    return grad_y.to(ctx.dtype), grad_weights, None, None, None, None, None, None, None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _no_second_order(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    raise Unsupported("the gradient of a dispatch can't be differentiated again: call backward without create_graph")


def register() -> None:
    """Tells autograd."""
    rounds.dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
    rounds.dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_keep_dispatch_again)
    rounds.combine.register_autograd(_combine_backward, setup_context=_keep_combine)
    rounds.dispatch_backward.register_autograd(_no_second_order, setup_context=_keep_nothing)
