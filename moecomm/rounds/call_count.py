"""Counts of failed calls that choose, or open, one of several Buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from moecomm.rounds.state import RoundState

_Method = TypeVar("_Method", bound=Callable[..., Any])
Marks = tuple[int, dict[RoundState, int]]  # calls that failed, and how many rounds each Buffer has made or counted


class CallCount:
    """The Buffers of calls that all ranks make in the same order.

    A call that fails on this rank before its round counts in every Buffer, also in those opened later, because it is
    not known in which one its peers wait.  Then the next round in any of them ends in OutOfStep on every rank,
    unless the call failed on all.
    """

    def __init__(self) -> None:
        self._states: list[weakref.ref[RoundState]] = []
        self.failed = 0

    def add(self, state: RoundState) -> None:
        """Add a Buffer that has just been opened."""
        for _ in range(self.failed):
            state.count_rejected()
        self._states = [weakref.ref(state), *(ref for ref in self._states if ref() is not None)]

    def marks(self) -> Marks:
        """Return the progress of all Buffers, for count_failure()."""
        return self.failed, {b: b.turn.made + b.turn.failed for ref in self._states if (b := ref()) is not None}

    def count_failure(self, marks: Marks, error: BaseException | None = None) -> None:
        """Count a call that has failed, unless it has made a round since, or a call of a Buffer in it has counted.

        `error`: with which it has failed.
        """
        failed, before = marks
        _, now = self.marks()
        if self.failed != failed or any(now[buffer] != before.get(buffer, failed) for buffer in now):
            return
        self.failed += 1
        for buffer in now:
            if error is not None:
                buffer._interrupted(error)
            buffer.count_failed()


class CountedCall:
    """Context of a call that makes one round.  Counts the call if it fails before that."""

    __slots__ = ("_count", "_marks")

    def __init__(self, count: CallCount) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._marks = self._count.marks()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._count.count_failure(self._marks, error)


def counted(of: Callable[[Any], CallCount]) -> Callable[[_Method], _Method]:
    """Decorate a collective method of one round, as CountedCall does; `of` finds the CallCount of its object."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            count = of(self)
            marks = count.marks()
            try:
                return method(self, *args, **named)
            except BaseException as error:
                count.count_failure(marks, error)
                raise

        return cast("_Method", call)

    return decorate
