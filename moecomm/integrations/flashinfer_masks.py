"""Masks of FlashInfer's moe_ep: the mask of its one-sided all-to-all, and the fault tolerance of its Fleet.

Its masks have 1 for a rank that takes part.  Calls that change them are collective among the ranks that stay, and those
that are taken in again: over Buffer.mask() and unmask(), which leave captured graphs as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from moecomm.buffer import Buffer
from moecomm.errors import BadInput, RoundFailed, Unsupported
from moecomm.membership.masking import is_masked


class MaskedRanks(ABC):
    """The calls of a Fleet that concern masks."""

    _known: list[int] | None = None  # the mask that the caller has given, or been told

    @abstractmethod
    def _open(self) -> Buffer: ...

    @property
    def supports_fault_tolerance(self) -> bool:
        """True: every backend can mask ranks."""
        return True

    @property
    def active_mask_epoch(self) -> int:
        """A number that grows with each change of the mask."""
        return self._open().rounds.attempts

    def active(self) -> list[int]:
        """Return the mask, by rank, on the host."""
        buffer = self._open()
        masked = set(buffer.masked)
        return [int(rank not in masked) for rank in range(buffer.num_ranks)]

    def query_active_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """int32 `[ranks]` on the device of the Buffer."""
        active = torch.tensor(self.active(), dtype=torch.int32)
        return active.to(self._open().rounds.device) if out is None else out.copy_(active)

    def query_fault(self) -> bool:
        """True if a call has raised that a rank is lost, or one was masked by itself, since the mask was last set."""
        buffer = self._open()
        try:
            buffer.rounds.require_alive()
        except RoundFailed:
            return True
        return self.active() != (self._known or [1] * buffer.num_ranks)

    def follow(self, wanted: list[int]) -> None:
        """Let these ranks take part, if the mask differs from the last known one or a call has failed.

        A mask that stays costs no look at the device.
        """
        if wanted != self._known or self.query_fault():
            self.set_active_mask(wanted)

    def set_active_mask(self, mask: Iterable[int] | torch.Tensor) -> None:
        """Let these ranks take part.  Collective among them, other than a Fleet's.

        Args:
            mask: 1 or 0 for each rank; 1 for this one, unless it is masked and the others don't take it in.

        Raises:
            As Buffer.mask() and unmask().
        """
        buffer = self._open()
        given = mask.tolist() if isinstance(mask, torch.Tensor) else mask
        wanted = list(given) if isinstance(given, Iterable) else []
        if len(wanted) != buffer.num_ranks or any(one not in (0, 1) for one in wanted) or not wanted[buffer.rank]:
            raise BadInput("mask", given, f"1 or 0 for each of {buffer.num_ranks} ranks, 1 for this one")
        if gone := [rank for rank, takes_part in enumerate(wanted) if not takes_part and rank not in buffer.masked]:
            buffer.mask(gone)
        if back := [rank for rank, takes_part in enumerate(wanted) if takes_part and is_masked(buffer.rounds, rank)]:
            buffer.unmask(back)
        self._known = self.active()

    def reconcile_active_mask(self, *, timeout_s: float | None = None) -> torch.Tensor:
        """Agree on who is lost, mask them, and return query_active_mask().  Collective among the rest.

        Raises:
            Unsupported: `timeout_s`, which is that of the Buffer.
            As Buffer.mask().
        """
        if timeout_s is not None:
            raise Unsupported("reconcile_active_mask(timeout_s=): that of the communication")
        self._open().mask()
        self._known = self.active()
        return self.query_active_mask()

    def clear_faults(self, *, readmit: bool = False) -> None:
        """Forget that ranks were masked; `readmit`: take them in again, collectively, these ranks as well.

        Raises:
            As Buffer.unmask().
        """
        buffer = self._open()
        if readmit and (back := [rank for rank in range(buffer.num_ranks) if is_masked(buffer.rounds, rank)]):
            buffer.unmask(back)
        self._known = self.active()


def active_ranks(mask: torch.Tensor, ranks: int) -> list[int]:
    """Return 1 or 0 for each rank: the bits of moe_a2a_active_rank_mask()."""
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.uint64 or mask.device.type != "cpu":
        raise BadInput("active_rank_mask", mask, "a uint64 tensor on the CPU, of moe_a2a_active_rank_mask()")
    words = mask.tolist()
    if len(words) != 1 or words[0] >> ranks:
        raise BadInput("active_rank_mask", words, f"one word with the bits of {ranks} ranks")
    return [words[0] >> rank & 1 for rank in range(ranks)]
