"""Matrix products and embedding lookups with the communication around them, as operators of torch.

    workspace = moecomm.overlap.Workspace(group, 64 << 20)
    inner = moecomm.overlap.all_gather_matmul(x, w1, workspace)  # columns of w1's output are spread over the ranks
    y = moecomm.overlap.matmul_reduce_scatter(torch.relu(inner), w2, workspace)

Each operator is collective: all ranks make the same calls in the same order, those of backward passes included.  Sizes
whose names appear under "agreed" are the same on all ranks.  Results are new tensors, and their bits do not depend on
which peer comes first.

Products accumulate in float32.  A rank's part of a sum over ranks is rounded to the dtype once, its own part too; the
sum is in float32, in rank order, and rounded once.  Sums of NCCL's collectives have NCCL's order and roundings.

On GPUs a call has several forms, whose bits may differ: docs/overlap.md has them.  `fused=None` measures the forms at
the first call of a kind, on all ranks, and keeps the fastest of the slowest rank for the life of the Workspace: see
Workspace.choices.  So the bits of another run may differ; `fused=True` and `fused=False` choose without a measurement.
Rows count up to the next power of two, so that few calls are measured.  In a graph's capture nothing is measured.

Matrices in FP8 are pairs, as of moecomm.fused.grouped_gemm (an Fp8): x is float8_e4m3fn with float32 scales
`[..., K / 128]`, one for 128 columns of a row; w is float8_e4m3fn with scales `[..., ceil(N / 128), K / 128]`, one for
128 rows and 128 columns.  K is a multiple of 128, and results are bfloat16.  Tensor cores add up 128 columns; each such
sum is multiplied by its scales and added in float32.  There are no gradients in FP8: Unsupported.

Gradients are those of the sum of the losses of all ranks, except for matmul_all_reduce.  Forward-mode AD and transforms
of torch.func raise Unsupported.

Errors of every operator:

- BadInput: a tensor that can't be used, or no room in the Workspace; names the bytes that are needed.
- Mismatch: ranks made different calls, or one wants a gradient that takes a round and another does not.  CPU ranks
  compare every call, GPUs the first call of each kind.
- OutOfStep: a call failed on some ranks and not on others.
- Timeout, PeerLost, Aborted: as of a moecomm.Window.  On GPUs a later call raises them, or Workspace.check().  A wait
  in a collective of NCCL ends as the process group's waits do.
- Closed, ConcurrentCall: the Workspace is closed, or in a call of another thread.
- Unsupported: `fused=True` where there is no fused kernel; FP8 tensors that require gradients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch

from moecomm.base import tangents
from moecomm.base.arrays import as_tensor
from moecomm.base.validation import check_flag, check_same_device
from moecomm.fused.fp8 import Fp8, Operand, as_operand
from moecomm.overlap import operators
from moecomm.overlap.measured import Choice
from moecomm.overlap.plans import has_round_back
from moecomm.overlap.workspace import Workspace, first, name_of, outer, repeated, run_plan

__all__ = [
    "Choice",
    "Workspace",
    "all_gather_matmul",
    "embedding_all_to_all",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]


@overload
def all_gather_matmul(
    x: Operand,
    w: Operand,
    workspace: Workspace | str,
    *,
    return_gathered: Literal[False] = ...,
    fused: bool | None = ...,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    workspace: Workspace | str,
    *,
    return_gathered: Literal[True],
    fused: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_gather_matmul(
    x: tuple[torch.Tensor, torch.Tensor],
    w: tuple[torch.Tensor, torch.Tensor],
    workspace: Workspace | str,
    *,
    return_gathered: Literal[True],
    fused: bool | None = ...,
) -> tuple[torch.Tensor, Fp8]: ...


def all_gather_matmul(
    x: Operand,
    w: Operand,
    workspace: Workspace | str,
    *,
    return_gathered: bool = False,
    fused: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | Fp8]:
    """Gather the rows of all ranks, and multiply them by this rank's weight.  Collective.  Gradients: x, w.

    The first half of a tensor-parallel layer: rows are spread over the ranks before it, columns after it.  The backward
    pass is a matmul_reduce_scatter.  If w requires a gradient, the gathered rows are kept for it.

    Args:
        x: bfloat16 or float16 `[M, K]`, or an Fp8.  Agreed: M, K, dtype.
        w: `[N, K]` of the same dtype, as torch.nn.Linear has it; each rank has its own, and its own N.
        workspace: a Workspace, or its `name`.
        return_gathered: return the gathered rows, too.  They have a gradient, which all ranks use or none.
        fused: GPUs: True, False, or None: the fastest form, measured at the first call of its kind.  CPU ranks have
            one form.

    Returns:
        `[R*M, N]`: concat(x of all ranks) @ w.T; and with `return_gathered` `[R*M, K]`, x of all ranks: in FP8 an Fp8.

    Raises:
        See moecomm.overlap.
    """
    if torch.compiler.is_compiling():
        return _all_gather_matmul(x, w, workspace, return_gathered, fused)
    gather = return_gathered
    if gather is False and torch.is_grad_enabled() and isinstance(w, torch.Tensor) and w.requires_grad:
        gather = True  # for the gradient of w
    if (call := repeated("all_gather_matmul", workspace, (gather, fused), (x, w))) is None:
        return first(workspace, _all_gather_matmul, x, w, workspace, return_gathered, fused)
    if call.direct:
        y, whole = run_plan(call)
    else:
        arguments = call.arguments(gather, fused)
        y, *rows = outer(call.owner, operators.all_gather_matmul, *arguments, gradient=call.gradient)
        whole = rows[0] if isinstance(x, torch.Tensor) else Fp8(*rows)
    product: torch.Tensor = y
    return (product, whole) if return_gathered else product


def matmul_reduce_scatter(
    x: Operand, w: Operand, workspace: Workspace | str, *, fused: bool | None = None
) -> torch.Tensor:
    """Multiply, add up the products of all ranks, and return this rank's rows.  Collective.  Gradients: x, w.

    The second half of a tensor-parallel layer: columns are spread over the ranks before it, rows after it.  The
    backward pass is an all_gather_matmul.

    Args:
        x: bfloat16 or float16 `[M, K]`, or an Fp8; M is a multiple of the number of ranks R.  Agreed: M, N, dtype.
        w: `[N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[M/R, N]`: rows r*M/R and following of the sum over ranks q, in rank order, of x_q @ w_q.T on rank r.

    Raises:
        See moecomm.overlap.
    """
    return _call("matmul_reduce_scatter", x, w, workspace, fused)


def matmul_all_reduce(x: Operand, w: Operand, workspace: Workspace | str, *, fused: bool | None = None) -> torch.Tensor:
    """Multiply, and add up the products of all ranks.  Collective.  Gradients: x, w.

    The second half of a tensor-parallel layer whose rows are on all ranks; with few rows, that of decoding.  All ranks
    get the same bits.  The backward pass has no communication: every rank has the result, and passes the gradient of
    one loss of all ranks, the same on each.

    Args:
        x: bfloat16 or float16 `[M, K]`, or an Fp8.  Agreed: M, N, dtype.
        w: `[N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[M, N]`: the sum over ranks, in rank order, of x @ w.T.

    Raises:
        See moecomm.overlap.
    """
    return _call("matmul_all_reduce", x, w, workspace, fused)


def matmul_all_to_all(x: Operand, w: Operand, workspace: Workspace | str, *, fused: bool | None = None) -> torch.Tensor:
    """Multiply by the weight of each local expert, and return rows to the ranks they are for.  Collective.

    The last product of experts with as many rows for each rank.  The backward pass is an all-to-all and two products.
    Gradients: x, w.

    Args:
        x: bfloat16 or float16 `[E, R, C, K]`, or an Fp8: C rows of E local experts for each of R ranks.
            Agreed: E, C, N, dtype.
        w: `[E, N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[R, E, C, N]`: on rank r, [q, e] is x_q[e, r] @ w_q[e].T.

    Raises:
        See moecomm.overlap.
    """
    return _call("matmul_all_to_all", x, w, workspace, fused)


def embedding_all_to_all(
    tables: torch.Tensor,
    indices: torch.Tensor,
    workspace: Workspace | str,
    *,
    offsets: torch.Tensor | None = None,
    fused: bool | None = None,
) -> torch.Tensor:
    """Add up bags of this rank's embedding tables for the whole batch, and return each rank its samples.  Collective.

    The step of a recommendation model from tables that are spread over the ranks to a batch that is.  A bag is added up
    in float32, in the order of its indices, and rounded once.  The backward pass is an all-to-all and a sum of the
    gradients of each row, in float32 and in order.  Gradient: tables.

    Args:
        tables: float32, bfloat16 or float16 `[T, V, D]`: T tables of V rows.  Agreed: T, B, D, dtype.
        indices: int64 `[T, R*B, L]`: rows of the bag of each sample of the batch, -1: none.  With `offsets`: `[total]`.
            Other indices raise BadInput on CPUs, and count as -1 on GPUs.
        workspace: a Workspace, or its `name`.
        offsets: int64 `[T*R*B + 1]`, from 0 to `total`: bag t*R*B + b has the indices from its offset up to the next.
        fused: see all_gather_matmul.

    Returns:
        `[R, T, B, D]`: on rank r, [q, t, b] is the sum over l of tables_q[t, indices_q[t, r*B + b, l]].

    Raises:
        See moecomm.overlap.
    """
    if torch.compiler.is_compiling():
        return _embedding_all_to_all(tables, indices, workspace, offsets, fused)
    given = (tables, indices) if offsets is None else (tables, indices, offsets)
    if (call := repeated("embedding_all_to_all", workspace, (fused,), given)) is None:
        return first(workspace, _embedding_all_to_all, tables, indices, workspace, offsets, fused)
    y: torch.Tensor
    if call.direct:
        y = run_plan(call)
        return y
    how = (call.owner.name, fused, call.gradient)
    y = outer(call.owner, operators.embedding_all_to_all, tables, indices, offsets, *how)
    return y


def _embedding_all_to_all(
    tables: torch.Tensor,
    indices: torch.Tensor,
    workspace: Workspace | str,
    offsets: torch.Tensor | None,
    fused: bool | None,
) -> torch.Tensor:
    """Check the arguments, and call the operator."""
    name = name_of(workspace)
    tables, indices = as_tensor("tables", tables)[0], as_tensor("indices", indices)[0]
    offsets = None if offsets is None else as_tensor("offsets", offsets)[0]
    check_same_device(tables=tables, indices=indices, offsets=offsets)
    tangents.refuse("moecomm.overlap.embedding_all_to_all", tables)
    how = (_fused(fused), has_round_back("embedding_all_to_all", tables))
    y: torch.Tensor = operators.embedding_all_to_all(tables, indices, offsets, name, *how)
    return y


class _Matrix(NamedTuple):
    """Values of a matrix, and its scales in FP8."""

    values: torch.Tensor
    scales: torch.Tensor | None


def _all_gather_matmul(
    x: Operand, w: Operand, workspace: Workspace | str, return_gathered: bool, fused: bool | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | Fp8]:
    """Check the arguments, and call the operator."""
    name, of_x, of_w = _matrices("all_gather_matmul", x, w, workspace)
    check_flag("return_gathered", return_gathered)
    keep = torch.is_grad_enabled() and of_w.values.requires_grad
    more = (bool(return_gathered) or keep, _fused(fused), of_x.scales, of_w.scales)
    gradient = has_round_back("all_gather_matmul", x)
    found: tuple[torch.Tensor, ...]
    found = operators.all_gather_matmul(of_x.values, of_w.values, name, *more, gradient=gradient)
    y, gathered, scales = found
    if not return_gathered:
        return y
    return y, gathered if of_x.scales is None else Fp8(gathered, scales)


def _call(operator: str, x: Operand, w: Operand, workspace: Workspace | str, fused: bool | None) -> torch.Tensor:
    """Call an operator of two matrices that has one result."""
    if torch.compiler.is_compiling():
        return _product(operator, x, w, workspace, fused)
    if (call := repeated(operator, workspace, (fused,), (x, w))) is None:
        return first(workspace, _product, operator, x, w, workspace, fused)
    y: torch.Tensor
    if call.direct:
        y = run_plan(call)
        return y
    y = outer(call.owner, getattr(operators, operator), *call.arguments(fused), gradient=call.gradient)
    return y


def _product(operator: str, x: Operand, w: Operand, workspace: Workspace | str, fused: bool | None) -> torch.Tensor:
    """Check the arguments, and call the operator."""
    name, of_x, of_w = _matrices(operator, x, w, workspace)
    run = getattr(operators, operator)
    gradient = has_round_back(operator, x, w)
    y: torch.Tensor = run(of_x.values, of_w.values, name, _fused(fused), of_x.scales, of_w.scales, gradient=gradient)
    return y


def _matrices(operator: str, x: Operand, w: Operand, workspace: Workspace | str) -> tuple[str, _Matrix, _Matrix]:
    """Return the name of the Workspace and both matrices, after checks that need no sizes."""
    name, found = name_of(workspace), []
    for argument, given in (("x", x), ("w", w)):
        operand = as_operand(argument, given)
        found.append(_Matrix(*operand) if isinstance(operand, Fp8) else _Matrix(operand, None))
    of_x, of_w = found
    check_same_device(x=of_x.values, w=of_w.values)
    check_same_device(x=of_x.values, w=of_w.scales)
    check_same_device(w=of_w.values, x=of_x.scales)
    tangents.refuse(f"moecomm.overlap.{operator}", *of_x, *of_w)
    return name, of_x, of_w


def _fused(fused: bool | None) -> bool | None:
    if fused is None:
        return None
    check_flag("fused", fused)
    return bool(fused)
