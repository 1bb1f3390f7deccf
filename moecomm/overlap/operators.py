"""The operators as operators of torch, whose arguments are tensors, numbers and names, with fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.base import tangents
from moecomm.base.arrays import check_memory
from moecomm.errors import BadInput
from moecomm.fused.fp8 import Fp8
from moecomm.overlap import sizes
from moecomm.overlap.agreement import FORWARD
from moecomm.overlap.workspace import Workspace, find


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operator of moecomm.overlap.all_gather_matmul.  `of`, here and below: see Workspace.call.

    The second and third results are the gathered rows and their scales; `[0]` without `gather`, or without scales.
    """
    tangents.refuse("moecomm::all_gather_matmul", x, w, x_scales, w_scales)
    with find(workspace).call(of=of) as owner:
        call = sizes.all_gather_matmul(owner.num_ranks, _matrix(x, x_scales), _matrix(w, w_scales))
        rows, weight = _plain_matrix(owner, "x", x, x_scales), _plain_matrix(owner, "w", w, w_scales)
        y, gathered = owner.executors.choose(call, fused).all_gather_matmul(rows, weight, gather)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = sizes.all_gather_matmul(find(workspace).num_ranks, _matrix(x, x_scales), _matrix(w, w_scales))
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
    ) -> torch.Tensor:
        tangents.refuse(f"moecomm::{name}", x, w, x_scales, w_scales)
        with find(workspace).call(of=of) as owner:
            call = sizes_of(owner.num_ranks, _matrix(x, x_scales), _matrix(w, w_scales))
            rows, weight = _plain_matrix(owner, "x", x, x_scales), _plain_matrix(owner, "w", w, w_scales)
            y: torch.Tensor = getattr(owner.executors.choose(call, fused), name)(rows, weight)
            return y

    def fake(
        x: torch.Tensor,
        w: torch.Tensor,
        workspace: str,
        fused: bool | None,
        x_scales: torch.Tensor | None = None,
        w_scales: torch.Tensor | None = None,
        of: int = FORWARD,
    ) -> torch.Tensor:
        call = sizes_of(find(workspace).num_ranks, _matrix(x, x_scales), _matrix(w, w_scales))
        return x.new_empty(call.result, dtype=call.dtype)

    operator = torch.library.custom_op(f"moecomm::{name}", run, mutates_args=())
    operator.register_fake(fake)
    return operator


matmul_reduce_scatter = _of_matrices("matmul_reduce_scatter")
matmul_all_reduce = _of_matrices("matmul_all_reduce")
matmul_all_to_all = _of_matrices("matmul_all_to_all")


@torch.library.custom_op("moecomm::embedding_all_to_all", mutates_args=())
def embedding_all_to_all(
    tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, workspace: str, fused: bool | None
) -> torch.Tensor:
    """Operator of moecomm.overlap.embedding_all_to_all."""
    tangents.refuse("moecomm::embedding_all_to_all", tables)
    with find(workspace).call() as owner:
        call = sizes.embedding_all_to_all(owner.num_ranks, tables, indices, offsets)
        tables, indices = _plain(owner, tables=tables, indices=indices)
        if offsets is not None:
            (offsets,) = _plain(owner, offsets=offsets)
        return owner.executors.choose(call, fused).embedding_all_to_all(tables, indices, offsets)


@embedding_all_to_all.register_fake
def _(
    tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, workspace: str, fused: bool | None
) -> torch.Tensor:
    call = sizes.embedding_all_to_all(find(workspace).num_ranks, tables, indices, offsets)
    return tables.new_empty(call.result)


@torch.library.custom_op("moecomm::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, workspace: str, of: int = FORWARD) -> torch.Tensor:
    """Send part q of x `[R, ...]` to rank q; return the parts for this rank, by the rank that sent them."""
    tangents.refuse("moecomm::all_to_all", x)
    with find(workspace).call(of=of) as owner:
        call = sizes.all_to_all(owner.num_ranks, x)
        (x,) = _plain(owner, x=x)
        return owner.executors.exchange(call).all_to_all(x)


@all_to_all.register_fake
def _(x: torch.Tensor, workspace: str, of: int = FORWARD) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _matrix(values: torch.Tensor, scales: torch.Tensor | None) -> sizes.Matrix:
    return values if scales is None else Fp8(values, scales)


def _plain_matrix(owner: Workspace, argument: str, values: torch.Tensor, scales: torch.Tensor | None) -> sizes.Matrix:
    """Return a matrix whose tensors are as _plain() makes them."""
    found = [_plain(owner, **{argument: tensor})[0] for tensor in (values, scales) if tensor is not None]
    return Fp8(*found) if len(found) == 2 else found[0]


def _plain(owner: Workspace, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each tensor, or a contiguous copy that is aligned to 16 bytes: gradients may be expanded or transposed.

    Raises BadInput for one on another device, or whose storage is too small.
    """
    found = []
    for argument, tensor in given.items():
        if tensor.device != owner.device:
            raise BadInput(argument, f"a tensor on {tensor.device}", f"one on {owner.device}, as the Workspace is")
        check_memory(argument, tensor)
        tensor = tensor.contiguous()
        found.append(tensor if tensor.data_ptr() % 16 == 0 else tensor.clone())
    return tuple(found)
