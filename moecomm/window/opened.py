"""The open memory of a Window: what lives until it is closed, or until the Window is gone."""

from __future__ import annotations

from contextlib import suppress

from moecomm import _native
from moecomm.ranks.peers import Peers
from moecomm.rounds.failures import Failure
from moecomm.window.calls import Calls
from moecomm.window.gate import Gate
from moecomm.window.memory import Memory


class Opened:
    """Memory of all ranks, the handle, and the calls on them.  It does not refer to its Window, whose end closes it."""

    def __init__(self, peers: Peers, memory: Memory, handle: _native.WindowHandle, calls: Calls) -> None:
        self.peers, self.memory, self.handle, self.calls = peers, memory, handle, calls
        self.gate = Gate()
        self.closed = False

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
