"""The open memory of a Window: what lives until it is closed, or until the Window is gone."""

from __future__ import annotations

from contextlib import suppress

import torch

from moecomm import _native
from moecomm.core.arrays import window_tensor
from moecomm.core.failures import Failure
from moecomm.core.peers import Peers
from moecomm.window.calls import Calls
from moecomm.window.gate import Gate

_UNIT = 256  # bytes; an arena hands out multiples of it


class Opened:
    """Memory of all ranks, the handle, and the calls on them.  It does not refer to its Window, whose end closes it."""

    def __init__(self, peers: Peers, handle: _native.WindowHandle, calls: Calls) -> None:
        self.peers, self.handle, self.calls = peers, handle, calls
        self.gate = Gate()
        self.closed = False
        self.addresses = list(peers.addresses)

    def bytes_of(self, rank: int) -> torch.Tensor:
        """Return uint8 `[nbytes]`: the memory of a rank.  The tensor keeps it mapped."""
        nbytes = self.handle.nbytes
        block = _native.Arena(0, -(-nbytes // _UNIT) * _UNIT).allocate(nbytes)
        assert block is not None
        owner = self.peers.owner(rank)
        return window_tensor(block, self.addresses[rank], (nbytes,), torch.uint8, self.peers.device, owner)

    def close(self) -> None:
        """End the calls under way, tell the peers, and let go of the memory.  Local and idempotent."""
        self.gate.close(lambda: self.calls.abort(Failure.aborted), self._end)

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            with suppress(RuntimeError):  # a broken CUDA context ends all waiting
                self.calls.synchronize()
                self.calls.leave()
        finally:
            self.peers.close()
