"""Calls of a Window between CPU ranks.  Each has happened when it returns."""

from __future__ import annotations

from array import array

import torch

from moecomm import _native
from moecomm.ranks.peers import Peers
from moecomm.window.memory import Memory


class HostCalls:
    """See moecomm.window.calls.Calls."""

    def __init__(self, peers: Peers, memory: Memory, handle: _native.WindowHandle) -> None:
        self._peers, self._handle = peers, handle
        self._tables = array("Q", memory.addresses), array("Q", peers.addresses)
        handle.peers, handle.control = (table.buffer_info()[0] for table in self._tables)
        self.handle_address = handle.address
        self.pointers = torch.tensor(memory.addresses, dtype=torch.int64)

    def signal(self, rank: int, index: int, amount: int) -> None:
        """See Calls."""
        self._handle.signal(rank, index, amount)

    def set_signal(self, rank: int, index: int, value: int) -> None:
        """See Calls."""
        self._handle.set_signal(rank, index, value)

    def signal_value(self, index: int) -> int:
        """See Calls."""
        return self._handle.signal_value(index)

    def wait(self, index: int, value: int, peer: int) -> bool:
        """See Calls."""
        return self._handle.wait(index, value, peer)

    def barrier(self) -> bool:
        """See Calls."""
        return self._handle.barrier()

    def abort_word(self) -> int:
        """See Calls."""
        own = self._peers.addresses[self._handle.rank] + self._handle.abort
        return _native.read_word(self._handle.abort_host) or _native.read_word(own)

    def abort(self, cause: int) -> None:
        """See Calls."""
        self._peers.abort(cause, self._handle.rank)
        for address in self._peers.addresses:
            _native.set_abort(address + self._handle.abort, cause, self._handle.rank)

    def capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def synchronize(self) -> None:
        """Do nothing: there are no streams."""

    def leave(self) -> None:
        """See Calls."""
        self._handle.leave()
