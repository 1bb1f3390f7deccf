"""The operators as operators of torch, whose arguments are tensors, numbers and names; fake kernels, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moecomm.base import tangents
from moecomm.base.arrays import check_memory
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.fp8 import Fp8
from moecomm.overlap import sizes
from moecomm.overlap.agreement import FORWARD
from moecomm.overlap.local import product, scatter_bags, sum_in_order
from moecomm.overlap.plans import has_round_back, key_of
from moecomm.overlap.workspace import Workspace, find, keep, number_of_call, repeated, run_plan


@torch.library.custom_op("moecomm::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    workspace: str,
    gather: bool,
    fused: bool | None,
    x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None,
    of: int = FORWARD,
    gradient: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operator of moecomm.overlap.all_gather_matmul.

    The second and third results are the gathered rows and their scales; `[0]` without `gather`, or without scales.

    Args, here and below:
        of: see Workspace.call.
        gradient: see Sizes.  An operator can't find it out: autograd is off in it, and graphs have other tensors.
    """
    given = _matrices(x, w, x_scales, w_scales)
    y, gathered = _call("all_gather_matmul", workspace, (gather, fused), given, of, gradient)
    nothing = x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    if gathered is None:
        return y, *nothing
    return (y, *gathered) if isinstance(gathered, Fp8) else (y, gathered, nothing[1])


@all_gather_matmul.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    workspace: str,
    gather: bool,
    fused: bool | None,
    x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None,
    of: int = FORWARD,
    gradient: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = sizes.all_gather_matmul(find(workspace).num_ranks, *_matrices(x, w, x_scales, w_scales).values())
    rows, depth = call.result[0], x.shape[1]
    return (
        x.new_empty(call.result, dtype=call.dtype),
        x.new_empty((rows, depth) if gather else (0,)),
        x.new_empty((rows, depth // sizes.GROUP) if gather and call.fp8 else (0,), dtype=torch.float32),
    )


def _of_matrices(name: str) -> Any:
    """Return the operator of moecomm.overlap.<name>, whose arguments are x and w, and whose result is one tensor."""
    sizes_of: Callable[[int, sizes.Matrix, sizes.Matrix], sizes.Sizes] = getattr(sizes, name)

    def run(
        x: torch.Tensor,
        w: torch.Tensor,
        workspace: str,
        fused: bool | None,
        x_scales: torch.Tensor | None = None,
        w_scales: torch.Tensor | None = None,
        of: int = FORWARD,
        gradient: bool | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = _call(name, workspace, (fused,), _matrices(x, w, x_scales, w_scales), of, gradient)
        return y

    def fake(
        x: torch.Tensor,
        w: torch.Tensor,
        workspace: str,
        fused: bool | None,
        x_scales: torch.Tensor | None = None,
        w_scales: torch.Tensor | None = None,
        of: int = FORWARD,
        gradient: bool | None = None,
    ) -> torch.Tensor:
        call = sizes_of(find(workspace).num_ranks, *_matrices(x, w, x_scales, w_scales).values())
        return x.new_empty(call.result, dtype=call.dtype)

    operator = torch.library.custom_op(f"moecomm::{name}", run, mutates_args=())
    operator.register_fake(fake)
    return operator


matmul_reduce_scatter = _of_matrices("matmul_reduce_scatter")
matmul_all_reduce = _of_matrices("matmul_all_reduce")
matmul_all_to_all = _of_matrices("matmul_all_to_all")


@torch.library.custom_op("moecomm::embedding_all_to_all", mutates_args=())
def embedding_all_to_all(
    tables: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    workspace: str,
    fused: bool | None,
    gradient: bool | None = None,
) -> torch.Tensor:
    """Operator of moecomm.overlap.embedding_all_to_all."""
    given = {"tables": tables, "indices": indices}
    if offsets is not None:
        given["offsets"] = offsets
    y: torch.Tensor = _call("embedding_all_to_all", workspace, (fused,), given, FORWARD, gradient)
    return y


@embedding_all_to_all.register_fake
def _(
    tables: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    workspace: str,
    fused: bool | None,
    gradient: bool | None = None,
) -> torch.Tensor:
    call = sizes.embedding_all_to_all(find(workspace).num_ranks, tables, indices, offsets)
    return tables.new_empty(call.result)


@torch.library.custom_op("moecomm::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, workspace: str, of: int = FORWARD, gradient: bool | None = None) -> torch.Tensor:
    """Send part q of x `[R, ...]` to rank q; return the parts for this rank, by the rank that sent them."""
    y: torch.Tensor = _call("all_to_all", workspace, (False,), {"x": x}, of, gradient)
    return y


@all_to_all.register_fake
def _(x: torch.Tensor, workspace: str, of: int = FORWARD, gradient: bool | None = None) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _matrices(
    x: torch.Tensor, w: torch.Tensor, x_scales: torch.Tensor | None, w_scales: torch.Tensor | None
) -> dict[str, sizes.Matrix]:
    """Return matrices by argument."""
    return {
        "x": x if x_scales is None else Fp8(x, x_scales),
        "w": w if w_scales is None else Fp8(w, w_scales),
    }


def _call(
    operator: str,
    workspace: str,
    options: tuple[bool | None, ...],
    given: Mapping[str, sizes.Matrix],
    of: int,
    gradient: bool | None,
) -> Any:
    """Run a call by its plan; make one if it is the first of its kind.

    Args:
        operator: its name.
        workspace: the name of the Workspace.
        options: [gather,] fused.
        given: tensors and matrices, by argument.
        of: see Workspace.call.
        gradient: see Sizes.
    """
    if (call := repeated(operator, workspace, options, tuple(given.values()), gradient)) is not None:
        return run_plan(call, of)
    tangents.refuse(f"moecomm::{operator}", *_tensors(given))
    owner = find(workspace)
    with owner.call(of), torch.autocast(owner.device.type, enabled=False):  # it would choose other dtypes
        of_ranks: Any = getattr(sizes, operator)
        found = of_ranks(owner.num_ranks, *given.values(), *([None] if len(given) == 2 and "tables" in given else []))
        ready = tuple(_plain_matrix(owner, argument, matrix) for argument, matrix in given.items())
        *gather, fused = options
        found = found._replace(gradient=gradient)
        with torch.inference_mode(False):  # a plan keeps tensors, for calls in either mode
            run, again = owner.executors.choose(found, fused, bool(gather and gather[0]), ready)
        result = run(*ready)
        if again:
            keep(owner, key_of(operator, options, tuple(given.values()), gradient), run)
        return result


def _tensors(given: Mapping[str, sizes.Matrix]) -> Iterator[torch.Tensor]:
    for matrix in given.values():
        yield from matrix if isinstance(matrix, Fp8) else (matrix,)


def _plain_matrix(owner: Workspace, argument: str, matrix: sizes.Matrix) -> sizes.Matrix:
    """Return a matrix whose tensors are as _plain() makes them."""
    return (
        Fp8(*(_plain(owner, argument, of) for of in matrix))
        if isinstance(matrix, Fp8)
        else _plain(owner, argument, matrix)
    )


def _plain(owner: Workspace, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a contiguous copy that is aligned to 16 bytes: gradients may be expanded or transposed.

    Raises BadInput for one on another device, or whose storage is too small.
    """
    if tensor.device != owner.device:
        raise BadInput(argument, f"a tensor on {tensor.device}", f"one on {owner.device}, as the Workspace is")
    check_memory(argument, tensor)
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


# Gradients: the backward pass of one operator is another.  Gradients are those of the sum of the losses of all ranks,
# except in matmul_all_reduce, whose result all ranks have: there the loss is one, and every rank passes the same
# gradient of it.


def _refuse_fp8(operator: str, scales: list[torch.Tensor | None]) -> None:
    """Raise Unsupported for a call with scales, whose gradients are wanted: after the round, so that no peer waits."""
    x_scales, w_scales = scales
    if x_scales is not None or w_scales is not None:
        raise Unsupported(f"gradients of moecomm.overlap.{operator} in FP8: detach x, w and their scales")


def _exchange_back(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Send part q of a gradient to rank q, for the call of `ctx`."""
    y: torch.Tensor = all_to_all(grad, ctx.workspace, ctx.call, has_round_back("all_to_all", grad))
    return y


def _keep_all_gather_matmul(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, w, ctx.workspace, ctx.gather, ctx.fused, *scales, _, _ = inputs
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
        how = {"of": ctx.call, "gradient": has_round_back("matmul_reduce_scatter", grad, w)}
        parts.append(matmul_reduce_scatter(grad, w.mT, ctx.workspace, ctx.fused, **how))
    if wants_x and ctx.gather and grad_gathered is not None:
        rows = grad_gathered.reshape(find(ctx.workspace).num_ranks, ctx.rows, grad_gathered.shape[1])
        parts.append(sum_in_order(_exchange_back(ctx, rows)))
    grad_x = sum_in_order(parts) if parts else None
    grad_w = product(grad.mT, gathered.mT) if wants_w and grad is not None else None
    return grad_x, grad_w, *(None for _ in range(7))


def _keep_matmul_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ctx.workspace, ctx.fused, *scales, _, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    _refuse_fp8("matmul_reduce_scatter", scales)
    ctx.save_for_backward(x, w)


def _matmul_reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    how = {"of": ctx.call, "gradient": has_round_back("all_gather_matmul", grad)}
    grad_x, gathered, _ = all_gather_matmul(grad, w.mT, ctx.workspace, wants_w, ctx.fused, **how)
    grad_w = product(gathered.mT, x.mT) if wants_w else None
    return grad_x if wants_x else None, grad_w, *(None for _ in range(6))


def _keep_matmul_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, _, *scales, _, _ = inputs
    _refuse_fp8("matmul_all_reduce", scales)
    ctx.save_for_backward(x, w)


def _matmul_all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    grad_w = product(grad.mT, x.mT) if wants_w else None
    return product(grad, w.mT) if wants_x else None, grad_w, *(None for _ in range(6))


def _keep_matmul_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, ctx.workspace, _, *scales, _, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    _refuse_fp8("matmul_all_to_all", scales)
    ctx.save_for_backward(x, w)


def _matmul_all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    rows = _exchange_back(ctx, grad).transpose(0, 1).flatten(1, 2)  # [E, R*C, N], as x has them
    grad_x = product(rows, w.mT).view(x.shape) if wants_x else None
    grad_w = product(rows.mT, x.flatten(1, 2).mT) if wants_w else None
    return grad_x, grad_w, *(None for _ in range(6))


def _keep_embedding_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tables, indices, offsets, ctx.workspace, _, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)
    ctx.rows = tables.shape[1]
    ctx.save_for_backward(indices, offsets)


def _embedding_all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    indices, offsets = ctx.saved_tensors
    batch = _exchange_back(ctx, grad).transpose(0, 1).flatten(1, 2)  # [T, R*B, D]
    return scatter_bags(batch, indices, offsets, ctx.rows), None, None, None, None, None


def _keep_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.workspace, _, _ = inputs
    ctx.call = number_of_call(ctx.workspace, output)


def _all_to_all_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _exchange_back(ctx, grad), None, None, None


for _operator, _keep, _backward in (
    (all_gather_matmul, _keep_all_gather_matmul, _all_gather_matmul_backward),
    (matmul_reduce_scatter, _keep_matmul_reduce_scatter, _matmul_reduce_scatter_backward),
    (matmul_all_reduce, _keep_matmul_all_reduce, _matmul_all_reduce_backward),
    (matmul_all_to_all, _keep_matmul_all_to_all, _matmul_all_to_all_backward),
    (embedding_all_to_all, _keep_embedding_all_to_all, _embedding_all_to_all_backward),
    (all_to_all, _keep_all_to_all, _all_to_all_backward),
):
    _operator.register_autograd(_backward, setup_context=_keep)
