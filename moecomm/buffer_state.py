"""The state of a Buffer that decides whether it can make another round."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import NoReturn

from moecomm import _native, backends, failures, forks
from moecomm.errors import Closed, ConcurrentCall, MoecommError, OutOfStep, RoundFailed


class BufferState:
    """Base of Buffer: its failure, and how many calls have reached the other ranks."""

    def __init__(self, session: backends.Session) -> None:
        self._session, self._record = session, session.context.record
        self._failure: MoecommError | None = None  # has ended this Buffer
        self._close: weakref.finalize[..., BufferState] = forks.closer(self, session)
        self._what = "Buffer"
        self.made, self.rejected = 0, 0  # dispatches and combines, and calls that count_rejected has counted
        self._turn = threading.RLock()  # held by the thread that is in a collective call
        self._depth = 0  # of the CollectiveCalls of that thread
        self._running = False  # a call that is not made up of others
        self._refused: list[None] = []  # an entry for each call that was refused and is not counted yet

    def begin_call(self, *, counted: bool = True) -> None:
        """Raises ConcurrentCall while another call is under way: in another thread, or, in a signal handler, in ours.

        `counted`: the next call counts this one among those that failed, as count_rejected does: the call under way,
        whose notices may not be sent yet, is not disturbed.
        """
        if not self._turn.acquire(blocking=False):
            self._refuse(counted)
        if self._running:
            self._turn.release()
            self._refuse(counted)
        self._running = True
        if self._refused and self._depth == 0:
            self._count_refused()

    def end_call(self) -> None:
        """The end of what begin_call began."""
        self._running = False
        self._turn.release()

    def begin_calls(self) -> None:
        """As begin_call, for a call that is made up of others of the same thread."""
        if not self._turn.acquire(blocking=False):
            self._refuse(counted=True)
        if self._running:
            self._turn.release()
            self._refuse(counted=True)
        if self._refused and self._depth == 0:
            self._count_refused()
        self._depth += 1

    def end_calls(self) -> None:
        """The end of what begin_calls began."""
        self._depth -= 1
        self._turn.release()

    def _refuse(self, counted: bool) -> NoReturn:
        if counted:
            self._refused.append(None)
        raise ConcurrentCall

    def _count_refused(self) -> None:
        while self._refused:
            self._refused.pop()
            if self._close.alive and self._failure is None:
                self._session.count_rejected()

    def count_rejected(self) -> None:
        """Counts a collective call that fails on this rank before all its rounds are made.

        The notices of later rounds carry the count: where it differs, every rank raises OutOfStep.
        """
        if self._close.alive and self._failure is None:
            self.rejected += 1
            self._session.count_rejected()

    def require_usable(self) -> None:
        """Raises Closed, or what earlier rounds left behind; does not wait for the device."""
        self.require_open()
        self.raise_failure()

    def require_open(self) -> None:
        """Raises Closed, or the failure that has ended the Buffer."""
        if not self._close.alive:
            raise Closed(self._what)
        if self._failure is not None:
            raise self._failure

    def raise_failure(self) -> None:
        """Raises what the last rounds left behind: once, unless a failed round has ended the Buffer."""
        if self._failure is not None:
            raise self._failure
        record = _native.record(self._record)
        if record is None:
            return
        error: MoecommError = failures.error_of(record, self._session.dead_peers())
        if isinstance(error, (RoundFailed, OutOfStep)):
            self._failure = error
        else:
            _native.clear_record(self._record)
        try:
            raise error
        finally:
            del error  # else it is in a cycle with its traceback, whose frames hold on to the window

    @property
    def session(self) -> backends.Session:
        """What the backend opened; for the modules of moecomm."""
        return self._session

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return not self._close.alive

    def disown(self) -> None:
        """In a forked child: closes it there, unheard by peers, and not where it was opened."""
        if self._close.detach() is not None:
            self._what = "Buffer, opened before this process was forked,"


class CollectiveCall:
    """Context of a call that makes `rounds` dispatches and combines: counts it if it fails before the last of them.

    A call inside that fails counts itself.
    """

    __slots__ = ("_buffer", "_made", "_rejected", "_rounds")

    def __init__(self, buffer: BufferState, rounds: int = 1) -> None:
        self._buffer, self._rounds = buffer, rounds

    def __enter__(self) -> None:
        buffer = self._buffer
        buffer.begin_calls()
        self._made, self._rejected = buffer.made + self._rounds, buffer.rejected

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buffer = self._buffer
        if kind is not None and buffer.rejected == self._rejected and buffer.made < self._made:
            buffer.count_rejected()
        buffer.end_calls()
