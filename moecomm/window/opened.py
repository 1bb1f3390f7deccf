"""The open memory of a Window, which lives until the Window is closed or gone, and the calls under way in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from moecomm import _native
from moecomm.ranks.peers import Peers
from moecomm.rounds.failures import Failure
from moecomm.window.calls import WindowCalls
from moecomm.window.memory import UserMemory


class CallGate:
    """Counts calls by thread.  close() ends them first, and runs its last step when none is under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()  # calls by thread
        self._last_step: Callable[[], None] | None = None  # for the end of this thread's calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of this thread."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin a call of this thread."""
        with self._changed:
            self._inside[threading.get_ident()] += 1

    def leave(self) -> None:
        """End a call of this thread; make the last step if it falls to this call."""
        thread = threading.get_ident()
        with self._changed:
            self._inside[thread] -= 1
            if self._inside[thread] == 0:
                del self._inside[thread]
            self._changed.notify_all()
            if self._inside or self._last_step is None:
                return
            step, self._last_step = self._last_step, None
        step()

    def close(self, abort: Callable[[], None], last_step: Callable[[], None]) -> None:
        """Call `abort` if calls are under way, wait until they have ended, and call `last_step`.

        Below a call of the same thread, which a signal handler has interrupted, the last call makes the last step.
        """
        with self._changed:
            if self._inside:
                abort()
            if threading.get_ident() in self._inside:
                self._last_step = last_step
                return
            self._changed.wait_for(lambda: not self._inside)
        last_step()


class OpenedWindow:
    """Memory of all ranks, the handle, and the calls on them.  It does not refer to its Window, whose end closes it."""

    def __init__(self, peers: Peers, memory: UserMemory, handle: _native.WindowHandle, calls: WindowCalls) -> None:
        self.peers, self.memory, self.handle, self.calls = peers, memory, handle, calls
        self.gate = CallGate()
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
