"""The hook of a dispatch that has begun."""

from __future__ import annotations

from collections.abc import Callable

from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.event import EventHandle
from moecomm.compat.deep_ep.waits import WaitCost
from moecomm.routed import Routed


class Arrival:
    """Receives the rows of a dispatch, once: when it is called, or before the next dispatch begins if that comes first.

    Called after that, which may be on another stream, it makes the current stream wait for the rows.

    Args:
        buffer, routed: of the dispatch.
        cost: adds up the waits.
        then: called on the stream that has received the rows.
    """

    def __init__(
        self, buffer: Buffer, routed: Routed, cost: WaitCost | None = None, then: Callable[[], object] | None = None
    ) -> None:
        self._buffer, self._cost, self._then = buffer, cost, then
        self._routed: Routed | None = routed
        self._early: EventHandle | None = None  # after the rows, on the stream that received them for the hook

    def __call__(self) -> None:
        if not self._receive() and self._early is not None:
            self._early.current_stream_wait()

    def receive_early(self) -> None:
        """Receive the rows on the current stream, unless the hook has been called, which may be on another one."""
        if self._receive():
            self._early = EventHandle()

    def _receive(self) -> bool:
        """Return whether this call receives the rows."""
        routed, self._routed = self._routed, None  # so that the window has its memory back when the caller's are gone
        if routed is None:
            return False
        then, self._then = self._then, None
        if self._cost is not None:
            self._cost.before(self._buffer.rounds, "dispatch")
        self._buffer.dispatch_end(routed, sync=False)
        if self._cost is not None:
            self._cost.after(self._buffer.rounds, "dispatch")
        if then is not None:
            then()
        return True
