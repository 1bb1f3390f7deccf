"""The contract of the calls of a Window, for CPU ranks and GPUs."""

from __future__ import annotations

from typing import Protocol

import torch


class Calls(Protocol):
    """Calls of one rank on open memory.  Arguments have been checked.  It is made collectively."""

    handle_address: int  # of the handle, in memory that kernels (GPUs) or this process (CPUs) read
    pointers: torch.Tensor  # int64 [ranks], on the device: address of every rank's memory

    def signal(self, rank: int, index: int, amount: int) -> None:
        """Add to a signal of a rank, after all earlier writes of this rank (GPUs: of the current stream)."""
        ...

    def set_signal(self, rank: int, index: int, value: int) -> None:
        """Store a signal of a rank, likewise."""
        ...

    def signal_value(self, index: int) -> int:
        """Load a signal of this rank.  GPUs: wait for the current stream."""
        ...

    def wait(self, index: int, value: int, peer: int) -> bool:
        """Wait until a signal of this rank is at least `value`; `peer`: -1, or the rank that raises it.

        Returns False on failure.  GPUs: enqueue the wait and return True.
        """
        ...

    def barrier(self) -> bool:
        """Wait until all ranks have come, likewise."""
        ...

    def abort_word(self) -> int:
        """Return the abort word of this rank, 0: none.  GPUs: the one that the host writes."""
        ...

    def abort(self, cause: int) -> None:
        """End every wait of all ranks, with this rank as the culprit."""
        ...

    def capturing(self) -> bool:
        """Return whether a CUDA graph captures the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the device that may use the window."""
        ...

    def leave(self) -> None:
        """Tell the peers that this rank has left.  Never waits for a peer."""
        ...
