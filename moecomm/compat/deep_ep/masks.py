"""deep_ep's mask of ranks in low-latency rounds, by moecomm.Buffer.mask()."""

from __future__ import annotations

import torch

from moecomm.base.arrays import has_memory
from moecomm.base.validation import check_flag, check_integer, check_same_device
from moecomm.compat.deep_ep.pool import OverPool, check_dimensions
from moecomm.errors import BadInput, Unsupported
from moecomm.membership.masking import is_masked


class MaskBuffer(OverPool):
    """The calls of Buffer that mask ranks.  Those that change a mask are collective, other than deep_ep's."""

    group_size: int

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, or take it in again.  All ranks that stay make this call; to unmask, that rank as well.

        Raises:
            Unsupported: masking before the first low-latency call, whose sizes are not known; see Buffer.mask.
        """
        check_integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        check_flag("mask", mask)
        opened = self._pool.low_latency()
        if mask and not opened:
            raise Unsupported("low_latency_update_mask_buffer(mask=True) before the first low-latency call")
        for buffer in opened:
            if mask != is_masked(buffer.rounds, rank_to_mask):
                change = buffer.mask if mask else buffer.unmask
                change([rank_to_mask])

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each masked rank, and 0 for others."""
        masked = {rank for buffer in self._pool.low_latency() for rank in buffer.masked}
        write_mask(mask_status, [rank in masked for rank in range(self.group_size)])

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all masked ranks in again.  All ranks make this call."""
        for buffer in self._pool.low_latency():
            # A rank's own list lacks the rank itself.
            own = {buffer.rank} if is_masked(buffer.rounds, buffer.rank) else set()
            if joining := own.union(buffer.masked):
                buffer.unmask(joining)


def write_mask(mask_status: torch.Tensor, masked: list[bool]) -> None:
    """Write 1 for each rank that is masked, and 0 for others."""
    check_dimensions("mask_status", mask_status, "ranks")
    check_same_device(mask_status=mask_status)
    if not has_memory(mask_status):
        raise BadInput("mask_status", "a tensor without memory", "one that has some")
    if mask_status.shape != (len(masked),) or mask_status.dtype is not torch.int32:
        raise BadInput("mask_status", f"{mask_status.dtype} {tuple(mask_status.shape)}", "int32 [ranks]")
    mask_status.copy_(torch.tensor(masked, dtype=torch.int32))
