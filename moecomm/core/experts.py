"""The experts of each rank: consecutive ones.  The first E % R ranks have one more than the others.

csrc/protocol/expert_ranges.h has the same for kernels and the host executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moecomm.core.arrays import as_tensor


def experts_of(rank: int, num_experts: int, ranks: int) -> range:
    """Return the experts of a rank."""
    least, longer = divmod(num_experts, ranks)
    first = rank * least + min(rank, longer)
    return range(first, first + least + (rank < longer))


def most_experts(num_experts: int, ranks: int) -> int:
    """Return the most experts that a rank has."""
    return -(-num_experts // ranks)


class _Table:
    """A table of experts by ids, at addresses that stay.

    Args:
        places: by id.
        device: of the ids that are translated.
    """

    def __init__(self, places: torch.Tensor, device: torch.device) -> None:
        self._places = _on(device, places)

    def translate(self, topk_idx: Any) -> Any:
        """Return the entry of each id: -1 for an expert that is not there, and for -1.

        Ids of no expert stay as they are, so that the round finds them.  Tensors that are no ids stay, too.
        """
        ids, _ = as_tensor("topk_idx", topk_idx)
        table = self._places.get(ids.dtype)
        return topk_idx if table is None else _looked_up(table, ids)


class LiveExperts(_Table):
    """Experts that ids mean while ranks are masked.  Captured graphs that translate ids follow each update.

    Args:
        count: of all experts.
        device: of the ids that are translated.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(torch.arange(count), device)

    def update(self, meanings: Sequence[int]) -> None:
        """Set the expert that each id means; -1: none.  Waits for the device."""
        for table in self._places.values():
            table.copy_(torch.tensor(meanings, dtype=table.dtype))


class ExpertIds(_Table):
    """Experts whose ids stay what they were when the Buffer had more ranks.

    Args:
        kept: ids of the experts that are there, ascending.
        count: of all experts, the lost ones too.
        device: of the ids that are translated.
    """

    def __init__(self, kept: Sequence[int], count: int, device: torch.device) -> None:
        self.kept, self.count = tuple(kept), count
        ids = torch.tensor(self.kept)
        places = torch.full((count,), -1)
        places[ids] = torch.arange(len(ids))
        super().__init__(places, device)
        self._ids = _on(device, ids)  # by dtype

    def range_of(self, places: range) -> range:
        """Return the ids of a rank's experts, which follow each other."""
        return range(self.kept[places.start], self.kept[places.stop - 1] + 1)

    def names(self, places: torch.Tensor) -> torch.Tensor:
        """Return the id of each place, int64 or int32; the inverse of translate(), but for lost experts."""
        return _looked_up(self._ids[places.dtype], places)


def _on(device: torch.device, table: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: table.to(device, dtype) for dtype in (torch.int64, torch.int32)}


def _looked_up(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table; what lies outside of it stays."""
    known = (at >= 0) & (at < len(table))
    return torch.where(known, table[at.clamp(0, len(table) - 1).long()], at)


def owners_of(ids: torch.Tensor, num_experts: int, ranks: int) -> torch.Tensor:
    """Return the rank of each expert, in the shape and dtype of `ids`; -1 of those below 0."""
    least, longer = divmod(num_experts, ranks)
    owners = ids.div(least, rounding_mode="floor")
    if longer:
        begin = longer * (least + 1)  # first expert of a rank that has not one more
        wide = ids.div(least + 1, rounding_mode="floor")
        owners = torch.where(ids < begin, wide, longer + (ids - begin).div(least, rounding_mode="floor"))
    return owners.clamp(min=-1)
