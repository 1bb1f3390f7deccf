"""Calls of a Window: their contract for CPU ranks and GPUs, and those between CPU ranks."""

from __future__ import annotations

from array import array
from typing import Protocol

import torch

from moecomm import _native
from moecomm.ranks.peers import Peers


class WindowCalls(Protocol):
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


class HostCalls:
    """The WindowCalls of CPU ranks.  Each call has happened when it returns."""

    def __init__(self, peers: Peers, handle: _native.WindowHandle) -> None:
        self._peers, self._handle = peers, handle
        self._table = array("Q", peers.addresses)
        handle.peers = handle.control = self._table.buffer_info()[0]
        self.handle_address = handle.address
        self.pointers = torch.tensor(peers.addresses, dtype=torch.int64)
        self.signal, self.set_signal, self.signal_value = handle.signal, handle.set_signal, handle.signal_value
        self.wait, self.barrier = handle.wait, handle.barrier

    def abort_word(self) -> int:
        own = self._peers.addresses[self._handle.rank] + self._handle.abort
        return _native.read_word(self._handle.abort_host) or _native.read_word(own)

    def abort(self, cause: int) -> None:
        self._peers.abort(cause, self._handle.rank)
        for address in self._peers.addresses:
            _native.set_abort(address + self._handle.abort, cause, self._handle.rank)

    def capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def synchronize(self) -> None:
        """Do nothing: there are no streams."""

    def leave(self) -> None:
        self._handle.leave()
