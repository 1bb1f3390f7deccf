"""Tables by expert id, in which a routing is looked up."""

from __future__ import annotations

import ctypes

import torch

from moecomm.base.arrays import check_memory
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import fields_of


class _Args(ctypes.Structure):
    """ExpertTableArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("ExpertTableArgs")


def kernel() -> plain_kernel.PlainKernel:
    """Return the kernel, for ids of both types."""
    return row_pass.kernel("elementwise/routing", "look_up_experts", "ExpertTableArgs")


def looked_up(ids: torch.Tensor, table: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Return what each id means, in the shape of `ids`.  Ids that the table does not have stay.

    Args:
        ids: int64 or int32.
        table: `[E]` of that dtype, on the same device; -1: no expert.
        absent: int64 `[1]`, in host memory (pinned, if the device is a GPU): gets the number of entries that mean no
            expert added, but for those that were -1 before.
    """
    if ids.is_cuda:
        return by_kernel(ids, table, absent)
    known = (ids >= 0) & (ids < len(table))
    meant = torch.where(known, table[ids.clamp(0, len(table) - 1).long()], ids)
    absent += (known & (meant < 0)).sum()
    return meant


def by_kernel(ids: torch.Tensor, table: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Do looked_up() by a kernel."""
    ids = ids.contiguous()
    check_memory("topk_idx", ids)
    meant = torch.empty_like(ids)
    args = _Args(
        ids=row_pass.address(ids),
        meant=row_pass.address(meant),
        table=row_pass.address(table),
        absent=row_pass.address(absent),
        entries=ids.numel(),
        experts=len(table),
        id_bytes=ids.element_size(),
    )
    row_pass.launch(kernel(), ids.device, ids.numel(), args)
    return meant
