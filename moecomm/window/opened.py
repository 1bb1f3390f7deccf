"""The open memory of a Window, which lives until the Window is closed or gone."""

from __future__ import annotations

from contextlib import suppress

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.ranks.peers import Peers
from moecomm.rounds.failures import Failure
from moecomm.window.calls import WindowCalls

_UNIT = 256  # bytes; an arena hands out multiples of it


class OpenedWindow:
    """Memory of all ranks, the handle, and the calls on them.  It does not refer to its Window, whose end closes it.

    Attributes:
        turn: of the threads that are in calls of the Window.
        closed: the memory is gone.
    """

    def __init__(self, peers: Peers, handle: _native.WindowHandle, calls: WindowCalls) -> None:
        self.peers, self.handle, self.calls = peers, handle, calls
        self.turn = _native.Turn(shared=True)
        self.closed = self._left = False

    def bytes_of(self, rank: int) -> torch.Tensor:
        """Return uint8 `[nbytes]`: the memory of a rank, which the tensor keeps mapped."""
        peers, nbytes = self.peers, self.handle.nbytes
        block = _native.Arena(0, -(-nbytes // _UNIT) * _UNIT).allocate(nbytes)
        assert block is not None
        return window_tensor(block, peers.addresses[rank], (nbytes,), torch.uint8, peers.device, peers.owner(rank))

    def close(self) -> None:
        """End the calls under way, tell the peers, and let go of the memory.  Local and idempotent.

        Below a call of the same thread, which a signal handler has interrupted, the last call under way does the rest.
        """
        turn = self.turn
        with _native.AwaitedTurn(turn, self._abort):
            if turn.running + turn.depth > 0:
                turn.closing = True
                self._abort()
            else:
                self.end()

    def end(self) -> None:
        """Tell the peers, and let go of the memory.  Every step can be repeated, because Ctrl-C may come in between."""
        if self.closed:
            return
        if not self._left:
            with suppress(RuntimeError):  # a broken CUDA context ends all waiting
                self.calls.synchronize()
                self.calls.leave()
            self._left = True
        self.peers.close()
        self.closed = True

    def _abort(self) -> None:
        self.calls.abort(Failure.aborted)
