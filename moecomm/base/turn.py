"""Turn: one thread at a time in the calls of an object, and the count of calls that were refused."""

from __future__ import annotations

import threading


class Turn:
    """Refuses a call while another is under way: in another thread, or below a signal handler.

    A call may consist of others of its thread.

    Attributes:
        depth: calls of this thread that consist of others, and are under way.
        running: a call that contains no other is under way.
        refused: an entry for each call that was refused; who counts them takes them away.
    """

    __slots__ = ("_lock", "depth", "refused", "running")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held by the thread that is in a call
        self.depth, self.running = 0, False
        self.refused: list[None] = []

    def begin(self, outer: bool = False) -> bool:
        """Begin a call, and return whether it may; `outer`: it consists of others."""
        if not self._lock.acquire(blocking=False):
            self.refused.append(None)
            return False
        if self.running:
            self._lock.release()
            self.refused.append(None)
            return False
        if outer:
            self.depth += 1
        else:
            self.running = True
        return True

    def end(self, outer: bool = False) -> None:
        """End what begin() began."""
        if outer:
            self.depth -= 1
        else:
            self.running = False
        self._lock.release()
