"""The operators as operators of torch, whose arguments are tensors, numbers and names, with fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.core import tangents
from moecomm.core.arrays import check_memory
from moecomm.errors import BadInput
from moecomm.overlap import sizes
from moecomm.overlap.workspace import Workspace, find


@torch.library.custom_op("moecomm::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, workspace: str, gather: bool, fused: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator of moecomm.overlap.all_gather_matmul; the second result is `[0]` without `gather`."""
    tangents.refuse("moecomm::all_gather_matmul", x, w)
    with find(workspace).call() as owner:
        call = sizes.all_gather_matmul(owner.num_ranks, x, w)
        x, w = _plain(owner, x=x, w=w)
        return owner.executors.choose(call, fused).all_gather_matmul(x, w, gather)


@all_gather_matmul.register_fake
def _(
    x: torch.Tensor, w: torch.Tensor, workspace: str, gather: bool, fused: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    call = sizes.all_gather_matmul(find(workspace).num_ranks, x, w)
    return x.new_empty(call.result), x.new_empty((call.result[0], x.shape[1]) if gather else (0,))


def _of_matrices(name: str) -> Any:
    """Return the operator of moecomm.overlap.<name>, whose arguments are x and w, and whose result is one tensor."""
    sizes_of: Callable[[int, torch.Tensor, torch.Tensor], sizes.Sizes] = getattr(sizes, name)

    def run(x: torch.Tensor, w: torch.Tensor, workspace: str, fused: bool | None) -> torch.Tensor:
        tangents.refuse(f"moecomm::{name}", x, w)
        with find(workspace).call() as owner:
            call = sizes_of(owner.num_ranks, x, w)
            x, w = _plain(owner, x=x, w=w)
            y: torch.Tensor = getattr(owner.executors.choose(call, fused), name)(x, w)
            return y

    def fake(x: torch.Tensor, w: torch.Tensor, workspace: str, fused: bool | None) -> torch.Tensor:
        return x.new_empty(sizes_of(find(workspace).num_ranks, x, w).result)

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
def all_to_all(x: torch.Tensor, workspace: str) -> torch.Tensor:
    """Send part q of x `[R, ...]` to rank q; return the parts for this rank, by the rank that sent them."""
    tangents.refuse("moecomm::all_to_all", x)
    with find(workspace).call() as owner:
        call = sizes.all_to_all(owner.num_ranks, x)
        (x,) = _plain(owner, x=x)
        return owner.executors.exchange(call).all_to_all(x)


@all_to_all.register_fake
def _(x: torch.Tensor, workspace: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


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
