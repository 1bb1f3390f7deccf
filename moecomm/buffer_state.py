"""The state of a Buffer that decides whether it can make another round."""

from __future__ import annotations

import weakref
from types import TracebackType

from moecomm import _native, backends, failures, forks
from moecomm.errors import Closed, MoecommError, OutOfStep, RoundFailed


class BufferState:
    """Base of Buffer: its failure, and how many calls have reached the other ranks."""

    def __init__(self, session: backends.Session) -> None:
        self._session, self._record = session, session.context.record
        self._failure: MoecommError | None = None  # has ended this Buffer
        self._close: weakref.finalize[..., BufferState] = forks.closer(self, session)
        self._what = "Buffer"
        self.made, self.rejected = 0, 0  # dispatches and combines, and calls that count_rejected has counted

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
        raise error


class CollectiveCall:
    """Context of a call that makes `rounds` dispatches and combines: counts it if it fails before the last of them.

    A call inside that fails counts itself.
    """

    __slots__ = ("_buffer", "_made", "_rejected")

    def __init__(self, buffer: BufferState, rounds: int = 1) -> None:
        self._buffer, self._made, self._rejected = buffer, buffer.made + rounds, buffer.rejected

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buffer = self._buffer
        if kind is not None and buffer.rejected == self._rejected and buffer.made < self._made:
            buffer.count_rejected()
