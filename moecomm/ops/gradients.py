"""Autograd formulas of the operators.

- The gradient of a dispatch is a combine without weights, which also returns the gradients of the weights.  A cast of
  its rows counts as the identity.
- The gradient of a combine is a dispatch with the same handle, and a product (combine_gradients).
- `graph`, an empty tensor, leads from a combine to the dispatches of its handle, so that all have their backward rounds
  on a rank whose experts got no token.
- The gradient of weights of slots is a sum for each expert, at the rank that owns it (moecomm.weights.slots).
- The gradient of a whole layer is one operator with all of these, moecomm.ops.layer.moe_backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.ops import layer, rounds
from moecomm.ops.combine_gradients import combine_gradients
from moecomm.rounds import names
from moecomm.weights import slots


def _of_round(ctx: Any) -> tuple[str, str, int]:
    return ctx.buffer, ctx.layout, ctx.max_rows


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, _, ctx.buffer, ctx.layout, *_, ctx.num_sms, _, _, ctx.layer, _, _, _, _, ctx.grad_wire = inputs
    rows, *_, memory, _ = output
    ctx.num_tokens, ctx.max_rows = x.shape[0], math.prod(rows.shape[:-1])
    ctx.save_for_backward(memory)


def _dispatch_backward(
    ctx: Any, grad_x: torch.Tensor, _: torch.Tensor, grad_weights: torch.Tensor, *others: Any
) -> tuple[Any, ...]:
    (memory,) = ctx.saved_tensors
    weighted = ctx.needs_input_grad[2]  # the same on all ranks, as the round of the dispatch has checked
    x, weights = rounds.dispatch_backward(
        grad_x,
        grad_weights if weighted else None,
        memory,
        *_of_round(ctx),
        ctx.num_tokens,
        ctx.num_sms,
        others[-1],
        ctx.layer,
        ctx.grad_wire,
    )
    return x, None, weights if weighted else None, *[None] * 14


def _keep_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, memory, ctx.buffer, ctx.layout, ctx.max_rows, _, ctx.num_sms, _, _, ctx.layer, _ = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(memory)


def _dispatch_again_backward(ctx: Any, grad: torch.Tensor, graph: torch.Tensor) -> tuple[Any, ...]:
    (memory,) = ctx.saved_tensors
    about = ctx.num_tokens, ctx.num_sms, graph, ctx.layer
    x, _ = rounds.dispatch_backward(grad, None, memory, *_of_round(ctx), *about)
    return x, *[None] * 10


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, row_weights, memory, ctx.buffer, ctx.layout, ctx.max_rows, *about = inputs
    *_, ctx.zero_padding, ctx.num_sms, _, _, ctx.layer, ctx.grad_wire = about
    ctx.dtype = y.dtype
    # Only the gradient of the weights needs y.
    weights_alone = ctx.needs_input_grad[1]
    ctx.save_for_backward(memory, row_weights, y if weights_alone else None)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    memory, row_weights, y = ctx.saved_tensors
    sent = grad.to(names.find(ctx.buffer).dtype)
    about: dict[str, Any] = {"backward": True, "layer": ctx.layer, "quantize": ctx.grad_wire}
    rows, _ = rounds.dispatch_again(sent, memory, *_of_round(ctx), ctx.zero_padding, ctx.num_sms, **about)
    wants_y, wants_graph = ctx.needs_input_grad[0], ctx.needs_input_grad[10]  # graphs leave out defaults at the end
    # A part of the rows, so that compilers keep the round where nothing needs the gradient of y.
    graph = rows.flatten()[:0] if wants_graph and not wants_y else None
    others = (*[None] * 8, graph, None, None, None)
    if row_weights is None:
        return rows.to(ctx.dtype), None, *others
    grad_y, grad_weights = combine_gradients(rows, row_weights, y, ctx.dtype)
    return grad_y, None if y is None else grad_weights, *others


def _keep_moe(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    given = dict(zip(layer.moe.names, inputs, strict=True))
    if given["w13_scales"] is not None or given["w2_scales"] is not None:
        # After the forward rounds, so no peer waits.
        raise Unsupported(
            "gradients of a layer with weights in FP8, or otherwise quantized: call it under torch.no_grad()"
        )
    bias = given["bias"]
    ctx.one_bias = bias is not None and bias.ndim == 1
    ctx.activation = given["activation"], given["activation_limit"], given["activation_alpha"]
    ctx.rounds = given["buffer"], given["interleaved"], given["max_rows"], given["overflow"]
    ctx.layer, ctx.balance = given["number"], given["balance"]
    saved = ("x", "topk_idx", "topk_weights", "w13", "w2", "w13_bias", "w2_bias")
    ctx.save_for_backward(*map(given.__getitem__, saved))


def _moe_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    wants_x, _, wants_weights, wants_w13, _, wants_w2, _, wants_bias, *rest = ctx.needs_input_grad
    wants_w13_bias, wants_w2_bias, *others = rest
    x = weights = w13 = w2 = bias = w13_bias = w2_bias = None
    if wants_x or wants_weights or wants_w13 or wants_w2 or wants_w13_bias or wants_w2_bias:
        wants = wants_w13, wants_w2, ctx.layer
        found = layer.moe_backward(grad, *ctx.saved_tensors, *ctx.rounds, *wants, *ctx.activation, ctx.balance)
        x, weights, w13, w2, w13_bias, w2_bias = found
    if wants_bias:
        bias = grad.sum(dim=0) if ctx.one_bias else grad
    return (
        x if wants_x else None,
        None,
        weights if wants_weights else None,
        w13 if wants_w13 else None,
        None,
        w2 if wants_w2 else None,
        None,
        bias,
        w13_bias if wants_w13_bias else None,
        w2_bias if wants_w2_bias else None,
        *[None] * len(others),
    )


def _keep_slots(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[torch.Tensor], torch.Tensor]) -> None:
    _, ctx.buffer = inputs
    ctx.save_for_backward(output[1])


def _slots_backward(ctx: Any, grads: list[torch.Tensor], _: Any) -> tuple[Any, ...]:
    (experts,) = ctx.saved_tensors
    return slots.slot_gradients(grads, experts, ctx.buffer), None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _no_second_order(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    raise Unsupported("the gradient of a round can't be differentiated again: call backward without create_graph")


def register() -> None:
    """Register the gradients of all operators with autograd."""
    rounds.dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
    rounds.dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_keep_dispatch_again)
    rounds.combine.register_autograd(_combine_backward, setup_context=_keep_combine)
    layer.moe.register_autograd(_moe_backward, setup_context=_keep_moe)
    slots.slot_weights.register_autograd(_slots_backward, setup_context=_keep_slots)
    for backward in (rounds.dispatch_backward, layer.moe_backward, combine_gradients, slots.slot_gradients):
        backward.register_autograd(_no_second_order, setup_context=_keep_nothing)
