"""Tables by expert id, in which a routing is looked up."""

from __future__ import annotations

import torch

from moecomm.base.arrays import check_memory
from moecomm.gpu import row_pass

KERNEL = row_pass.kernel("look_up_experts")  # for ids of both types


def looked_up(ids: torch.Tensor, table: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Return the expert of each id, in the shape of `ids`.  Ids outside of the table stay.

    Args:
        ids: int64 or int32.
        table: `[E]` of that dtype, on the same device; -1: no expert.
        absent: int64 `[1]`, in host memory (pinned, if the device is a GPU): gets the number of entries that mean no
            expert added, but for those that were -1 before.
    """
    if not ids.is_cuda:
        known = (ids >= 0) & (ids < len(table))
        meant = torch.where(known, table[ids.clamp(0, len(table) - 1).long()], ids)
        absent += (known & (meant < 0)).sum()
        return meant
    ids = ids.contiguous()
    check_memory("topk_idx", ids)
    meant = torch.empty_like(ids)
    row_pass.run(
        KERNEL,
        ids.device,
        ids.numel(),
        ids=ids.data_ptr(),
        meant=meant.data_ptr(),
        table=table.data_ptr(),
        absent=absent.data_ptr(),
        entries=ids.numel(),
        experts=len(table),
        id_bytes=ids.element_size(),
    )
    return meant
