"""The open memory of a Window, which lives until the Window is closed or gone."""

from __future__ import annotations

from contextlib import suppress

from moecomm import _native
from moecomm.ranks.peers import Peers
from moecomm.rounds.failures import Failure
from moecomm.window.calls import WindowCalls
from moecomm.window.memory import UserMemory


class OpenedWindow:
    """Memory of all ranks, the handle, and the calls on them.  It does not refer to its Window, whose end closes it.

    Attributes:
        turn: of the threads that are in calls of the Window.
        closed: the memory is gone.
    """

    def __init__(self, peers: Peers, memory: UserMemory, handle: _native.WindowHandle, calls: WindowCalls) -> None:
        self.peers, self.memory, self.handle, self.calls = peers, memory, handle, calls
        self.turn = _native.Turn(shared=True)
        self.closed = self._left = False

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
