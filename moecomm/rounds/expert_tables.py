"""Tables of the experts that ids mean, where experts are lost or ranks are masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moecomm.base.arrays import as_tensor
from moecomm.gpu import expert_table


class AbsentEntries:
    """The number of entries of routings whose experts are not there.

    The host reads it without the device, which adds to it in pinned memory.

    Args:
        device: of the routings.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._before = 0  # the last reset

    def read(self) -> int:
        """Return the number so far, without waiting for the device."""
        return int(self.words) - self._before

    def reset(self) -> None:
        """Count from 0 again, likewise."""
        self._before = int(self.words)


class _Table:
    """A table of experts by ids, at addresses that stay.

    Args:
        places: by id.
        device: of the ids that are translated.
    """

    def __init__(self, places: torch.Tensor, device: torch.device) -> None:
        self._places = _on(device, places)

    def translate(self, topk_idx: Any, absent: AbsentEntries) -> Any:
        """Return the entry of each id: -1 for an expert that is not there, and for -1.

        Ids of no expert stay as they are, so that the round finds them.  Tensors that are no ids stay, too.

        Args:
            topk_idx: ids.
            absent: counts entries whose experts are not there.
        """
        ids, _ = as_tensor("topk_idx", topk_idx)
        table = self._places.get(ids.dtype)
        if table is None or table.device != ids.device:
            return topk_idx
        return expert_table.looked_up(ids, table, absent.words)


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
        ids = self._ids[places.dtype]
        known = (places >= 0) & (places < len(ids))
        return torch.where(known, ids[places.clamp(0, len(ids) - 1).long()], places)


class ExpertNames:
    """The experts that callers name, and those that rounds know: other ones after a loss, or while ranks are masked.

    Attributes:
        ids: of experts that callers name, after shrink(keep_ids=True); None: those of the rounds.
        live: the experts that ids mean while ranks are masked; None: ranks have never been masked.
        replicas: by expert, for experts of masked ranks.
        absent: counts entries whose experts are not there.
        count: of the experts that callers name: those that the Buffer was opened with.

    Args:
        count: of the experts that the Buffer was opened with.
        ids: see Attributes.
        device: of the ids that are translated.
    """

    def __init__(self, count: int, ids: ExpertIds | None, device: torch.device) -> None:
        self.ids = ids
        self.live: LiveExperts | None = None
        self.replicas: dict[int, int] = {}
        self.absent = AbsentEntries(device)
        self.count = count if ids is None else ids.count

    def own_ids(self, topk_idx: Any) -> Any:
        """Return the ids by which rounds know the experts that a caller names; -1 for those of ranks that are lost."""
        if topk_idx is None:
            return None
        if self.ids is not None:
            topk_idx = self.ids.translate(topk_idx, self.absent)
        return topk_idx if self.live is None else self.live.translate(topk_idx, self.absent)


def _on(device: torch.device, table: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: table.to(device, dtype) for dtype in (torch.int64, torch.int32)}
