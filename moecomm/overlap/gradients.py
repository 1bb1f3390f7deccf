"""Autograd formulas of the operators: the backward pass of one is another.

Gradients are those of the sum of the losses of all ranks, except in matmul_all_reduce, whose result all ranks have:
there the loss is one, and every rank passes the same gradient of it.
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.overlap import bags, operators
from moecomm.overlap.products import product, sum_in_order
from moecomm.overlap.workspace import find, number_of_call


def _refuse_fp8(operator: str, scales: list[torch.Tensor | None]) -> None:
    """Raise Unsupported for a call with scales, whose gradients are wanted: after the round, so that no peer waits."""
    if any(tensor is not None for tensor in scales):
        raise Unsupported(f"gradients of moecomm.overlap.{operator} in FP8: detach x, w and their scales")


def _keep_all_gather_matmul(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, w, ctx.workspace, ctx.gather, ctx.fused, *scales, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output[0])
    _refuse_fp8("all_gather_matmul", scales)
    if ctx.needs_input_grad[1] and not ctx.gather:  # the same on all ranks, and after the round: no peer waits
        raise Unsupported("the gradient of w without gather=True: moecomm.overlap.all_gather_matmul passes it")
    ctx.set_materialize_grads(False)  # a gathered x that nobody uses needs no exchange
    ctx.rows = x.shape[0]
    ctx.save_for_backward(w, output[1] if ctx.needs_input_grad[1] else None)


def _all_gather_matmul_backward(
    ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None, grad_scales: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    w, gathered = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    parts = []
    if wants_x and grad is not None:
        parts.append(operators.matmul_reduce_scatter(grad, w.mT, ctx.workspace, ctx.fused, of=ctx.call))
    if wants_x and ctx.gather and grad_gathered is not None:
        rows = grad_gathered.reshape(find(ctx.workspace).num_ranks, ctx.rows, grad_gathered.shape[1])
        parts.append(sum_in_order(operators.all_to_all(rows, ctx.workspace, ctx.call)))
    grad_x = sum_in_order(parts) if parts else None
    grad_w = product(grad.mT, gathered.mT) if wants_w and grad is not None else None
    return grad_x, grad_w, *(None for _ in range(6))


def _keep_matmul_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ctx.workspace, ctx.fused, *scales, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    _refuse_fp8("matmul_reduce_scatter", scales)
    ctx.save_for_backward(x, w)


def _matmul_reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    grad_x, gathered, _ = operators.all_gather_matmul(grad, w.mT, ctx.workspace, wants_w, ctx.fused, of=ctx.call)
    grad_w = product(gathered.mT, x.mT) if wants_w else None
    return grad_x if wants_x else None, grad_w, *(None for _ in range(5))


def _keep_matmul_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, _, *scales, _ = inputs
    _refuse_fp8("matmul_all_reduce", scales)
    ctx.save_for_backward(x, w)


def _matmul_all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    grad_w = product(grad.mT, x.mT) if wants_w else None
    return product(grad, w.mT) if wants_x else None, grad_w, *(None for _ in range(5))


def _keep_matmul_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ctx.workspace, _, *scales, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    _refuse_fp8("matmul_all_to_all", scales)
    ctx.save_for_backward(x, w)


def _matmul_all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    rows = (
        operators.all_to_all(grad, ctx.workspace, ctx.call).transpose(0, 1).flatten(1, 2)
    )  # [E, R*C, N], as x has them
    grad_x = product(rows, w.mT).view(x.shape) if wants_x else None
    grad_w = product(rows.mT, x.flatten(1, 2).mT) if wants_w else None
    return grad_x, grad_w, *(None for _ in range(5))


def _keep_embedding_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tables, indices, offsets, ctx.workspace, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    ctx.rows = tables.shape[1]
    ctx.save_for_backward(indices, offsets)


def _embedding_all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    indices, offsets = ctx.saved_tensors
    batch = operators.all_to_all(grad, ctx.workspace, ctx.call).transpose(0, 1).flatten(1, 2)  # [T, R*B, D]
    return bags.scatter(batch, indices, offsets, ctx.rows), None, None, None, None


def _keep_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.workspace, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)


def _all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return operators.all_to_all(grad, ctx.workspace, ctx.call), None, None


def register() -> None:
    """Register the gradients of all operators with autograd."""
    for operator, keep, backward in (
        (operators.all_gather_matmul, _keep_all_gather_matmul, _all_gather_matmul_backward),
        (operators.matmul_reduce_scatter, _keep_matmul_reduce_scatter, _matmul_reduce_scatter_backward),
        (operators.matmul_all_reduce, _keep_matmul_all_reduce, _matmul_all_reduce_backward),
        (operators.matmul_all_to_all, _keep_matmul_all_to_all, _matmul_all_to_all_backward),
        (operators.embedding_all_to_all, _keep_embedding_all_to_all, _embedding_all_to_all_backward),
        (operators.all_to_all, _keep_all_to_all, _all_to_all_backward),
    ):
        operator.register_autograd(backward, setup_context=keep)
