"""Calls over several Buffers, one of which each call chooses or opens: those that fail before that are counted too."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from moecomm.buffer_state import BufferState

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CallCount:
    """The Buffers of calls that all ranks make in the same order.

    A call that fails on this rank before its round counts in every Buffer, also in those opened later, because it is
    not known in which one the other ranks wait.  Then the next round in any of them ends in OutOfStep on every rank,
    unless the call failed on all.
    """

    def __init__(self) -> None:
        self._buffers: list[weakref.ref[BufferState]] = []
        self.failed = 0

    def add(self, buffer: BufferState) -> None:
        """Takes one that has just been opened."""
        for _ in range(self.failed):
            buffer.count_rejected()
        self._buffers = [weakref.ref(buffer), *(ref for ref in self._buffers if ref() is not None)]

    def buffers(self) -> list[BufferState]:
        """Those that are still referenced."""
        return [buffer for ref in self._buffers if (buffer := ref()) is not None]

    def fail(self) -> None:
        """Counts a call."""
        self.failed += 1
        for buffer in self.buffers():
            buffer.count_failed()


class CountedCall:
    """Context of a call: counts it if it fails before it has made a round, or a call of a Buffer in it has counted."""

    __slots__ = ("_before", "_count", "_failed")

    def __init__(self, count: CallCount) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._failed = self._count.failed
        self._before = {buffer: buffer.made + buffer.rejected for buffer in self._count.buffers()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._count.failed != self._failed:
            return
        before = self._before
        if all(b.made + b.rejected == before.get(b, self._failed) for b in self._count.buffers()):
            self._count.fail()


def counted(of: Callable[[Any], CallCount]) -> Callable[[_Method], _Method]:
    """Decorates a collective method of one round; `of` finds the CallCount of its object."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            with CountedCall(of(self)):
                return method(self, *args, **named)

        return cast("_Method", call)

    return decorate
