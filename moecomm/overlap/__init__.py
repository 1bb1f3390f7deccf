"""Matrix products and embedding lookups with the communication around them, as operators of torch.

    workspace = moecomm.overlap.Workspace(group, 64 << 20)
    inner = moecomm.overlap.all_gather_matmul(x, w1, workspace)  # columns of w1's output are spread over the ranks
    y = moecomm.overlap.matmul_reduce_scatter(torch.relu(inner), w2, workspace)

Each operator is collective: all ranks make the same calls in the same order, those of backward passes included.  Sizes
whose names appear under "agreed" are the same on all ranks.  Results are new tensors, and their bits depend neither on
timing nor on which peer comes first.

Products accumulate in float32.  A rank's part of a sum over ranks is rounded to the dtype once, its own part too; the
sum is in float32, in rank order, and rounded once.

Gradients are those of the sum of the losses of all ranks, except for matmul_all_reduce.  Forward-mode AD and transforms
of torch.func raise Unsupported.

Errors of every operator:

- BadInput: a tensor that can't be used, or no room in the Workspace; names the bytes that are needed.
- Mismatch: ranks made different calls.  CPU ranks compare every call, GPUs the first call of each kind.
- OutOfStep: a call failed on some ranks and not on others.
- Timeout, PeerLost, Aborted: as of a moecomm.Window.  On GPUs a later call raises them, or Workspace.check().
- Closed, ConcurrentCall: the Workspace is closed, or in a call of another thread.
- Unsupported: `fused=True` where there is no fused kernel.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from moecomm.core import tangents
from moecomm.core.arrays import as_tensor
from moecomm.core.validation import check_flag, check_same_device
from moecomm.overlap import gradients, operators
from moecomm.overlap.workspace import Workspace, counted, name_of

__all__ = [
    "Workspace",
    "all_gather_matmul",
    "embedding_all_to_all",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]

gradients.register()


@overload
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
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


@counted
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    workspace: Workspace | str,
    *,
    return_gathered: bool = False,
    fused: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gather the rows of all ranks, and multiply them by this rank's weight.  Collective.  Gradients: x, w.

    The first half of a tensor-parallel layer: rows are spread over the ranks before it, columns after it.  The backward
    pass is a matmul_reduce_scatter.  If w requires a gradient, the gathered rows are kept for it.

    Args:
        x: bfloat16 or float16 `[M, K]`.  Agreed: M, K, dtype.
        w: `[N, K]` of the same dtype, as torch.nn.Linear has it; each rank has its own, and its own N.
        workspace: a Workspace, or its `name`.
        return_gathered: return the gathered rows, too.  They have a gradient, which all ranks use or none.
        fused: GPUs: True or False; None: as measured.  CPU ranks have one form.

    Returns:
        `[R*M, N]`: concat(x of all ranks) @ w.T; and with `return_gathered` `[R*M, K]`, x of all ranks.

    Raises:
        See moecomm.overlap.
    """
    name, x, w = _matrices("all_gather_matmul", x, w, workspace)
    check_flag("return_gathered", return_gathered)
    keep = torch.is_grad_enabled() and w.requires_grad
    y, gathered = operators.all_gather_matmul(x, w, name, bool(return_gathered) or keep, _fused(fused))
    return (y, gathered) if return_gathered else y


@counted
def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, workspace: Workspace | str, *, fused: bool | None = None
) -> torch.Tensor:
    """Multiply, add up the products of all ranks, and return this rank's rows.  Collective.  Gradients: x, w.

    The second half of a tensor-parallel layer: columns are spread over the ranks before it, rows after it.  The
    backward pass is an all_gather_matmul.

    Args:
        x: bfloat16 or float16 `[M, K]`; M is a multiple of the number of ranks R.  Agreed: M, N, dtype.
        w: `[N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[M/R, N]`: rows r*M/R and following of the sum over ranks q, in rank order, of x_q @ w_q.T on rank r.

    Raises:
        See moecomm.overlap.
    """
    name, x, w = _matrices("matmul_reduce_scatter", x, w, workspace)
    y: torch.Tensor = operators.matmul_reduce_scatter(x, w, name, _fused(fused))
    return y


@counted
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, workspace: Workspace | str, *, fused: bool | None = None
) -> torch.Tensor:
    """Multiply, and add up the products of all ranks.  Collective.  Gradients: x, w.

    The second half of a tensor-parallel layer whose rows are on all ranks; with few rows, that of decoding.  All ranks
    get the same bits.  The backward pass has no communication: every rank has the result, and passes the gradient of
    one loss of all ranks, the same on each.

    Args:
        x: bfloat16 or float16 `[M, K]`.  Agreed: M, N, dtype.
        w: `[N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[M, N]`: the sum over ranks, in rank order, of x @ w.T.

    Raises:
        See moecomm.overlap.
    """
    name, x, w = _matrices("matmul_all_reduce", x, w, workspace)
    y: torch.Tensor = operators.matmul_all_reduce(x, w, name, _fused(fused))
    return y


@counted
def matmul_all_to_all(
    x: torch.Tensor, w: torch.Tensor, workspace: Workspace | str, *, fused: bool | None = None
) -> torch.Tensor:
    """Multiply by the weight of each local expert, and return rows to the ranks they are for.  Collective.

    The last product of experts with as many rows for each rank.  The backward pass is an all-to-all and two products.
    Gradients: x, w.

    Args:
        x: bfloat16 or float16 `[E, R, C, K]`: C rows of E local experts for each of R ranks.  Agreed: E, C, N, dtype.
        w: `[E, N, K]` of the same dtype; each rank has its own, and its own K.
        workspace: a Workspace, or its `name`.
        fused: see all_gather_matmul.

    Returns:
        `[R, E, C, N]`: on rank r, [q, e] is x_q[e, r] @ w_q[e].T.

    Raises:
        See moecomm.overlap.
    """
    name, x, w = _matrices("matmul_all_to_all", x, w, workspace)
    y: torch.Tensor = operators.matmul_all_to_all(x, w, name, _fused(fused))
    return y


@counted
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
    name = name_of(workspace)
    tables, indices = as_tensor("tables", tables)[0], as_tensor("indices", indices)[0]
    offsets = None if offsets is None else as_tensor("offsets", offsets)[0]
    check_same_device(tables=tables, indices=indices, offsets=offsets)
    tangents.refuse("moecomm.overlap.embedding_all_to_all", tables)
    y: torch.Tensor = operators.embedding_all_to_all(tables, indices, offsets, name, _fused(fused))
    return y


def _matrices(
    operator: str, x: torch.Tensor, w: torch.Tensor, workspace: Workspace | str
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the name of the Workspace and both matrices as tensors, after checks that need no sizes."""
    name, x, w = name_of(workspace), as_tensor("x", x)[0], as_tensor("w", w)[0]
    check_same_device(x=x, w=w)
    tangents.refuse(f"moecomm.overlap.{operator}", x, w)
    return name, x, w


def _fused(fused: bool | None) -> bool | None:
    if fused is None:
        return None
    check_flag("fused", fused)
    return bool(fused)
