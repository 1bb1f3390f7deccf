"""Counts of failed calls that choose, or open, one of several Buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast

from moecomm import _native
from moecomm.rounds.state import RoundState

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PROGRESS = attrgetter("made", "failed")
Marks = tuple[int, dict[_native.Turn, tuple[int, int]]]  # calls that failed, and the progress of each Buffer


class CallCount:
    """The Buffers of calls that all ranks make in the same order.

    A call that fails on this rank before its round counts in every Buffer, also in those opened later, because it is
    not known in which one its peers wait.  Then the next round in any of them ends in OutOfStep on every rank,
    unless the call failed on all.

    Attributes:
        turn: of its calls, which several threads may make at once.
    """

    def __init__(self) -> None:
        self._states: list[weakref.ref[RoundState]] = []
        self.turns: list[_native.Turn] = []  # of these
        self.turn = _native.Turn(shared=True)

    @property
    def failed(self) -> int:
        """The calls that have been counted."""
        return self.turn.failed

    def add(self, state: RoundState) -> None:
        """Add a Buffer that has just been opened."""
        for _ in range(self.failed):
            state.count_rejected()
        states = [state, *self._alive()]
        self._states, self.turns = list(map(weakref.ref, states)), [state.turn for state in states]

    def _alive(self) -> list[RoundState]:
        return [state for ref in self._states if (state := ref()) is not None]

    def marks(self) -> Marks:
        """Return the progress of all Buffers, for count_failure()."""
        return self.turn.failed, dict(zip(self.turns, map(_PROGRESS, self.turns), strict=True))

    def count_failure(self, marks: Marks, error: BaseException | None) -> None:
        """Count a failed call, unless a round was made, or a call of a Buffer inside it was counted, since `marks`.

        `error`: that of the call; None: not known.
        """
        failed, before = marks
        _, now = self.marks()
        if self.failed != failed or any(now[turn] != before.get(turn, (0, failed)) for turn in now):
            return
        self.turn.failed += 1
        for buffer in self._alive():
            buffer._interrupted(error)
            buffer.count_failed()

    # What _native.Call asks of its owner.

    def _begin_call(self, rounds: int, nested: bool, marks: Marks) -> None:
        """Do nothing: calls are counted when they end."""

    def _count_refused(self) -> None:
        while self.turn.uncounted > 0:
            self.turn.counted()

    def _interrupted(self, error: BaseException | None, marks: Marks) -> None:
        if error is None:  # else _call_failed() follows
            self.count_failure(marks, error)

    def _call_failed(self, error: BaseException, missed: bool, marks: Marks) -> None:
        self.count_failure(marks, error)


def CountedCall(count: CallCount) -> _native.Call:
    """Return the context of a call that makes one round.  Counts the call if it fails before that."""
    return _native.Call(count, 1, count.marks())


def counted(of: Callable[[Any], CallCount]) -> Callable[[_Method], _Method]:
    """Decorate a collective method of one round, as CountedCall does; `of` finds the CallCount of its object."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            count = of(self)
            # Every call passes here: CountedCall(count), without further functions of Python.
            progress = dict(zip(count.turns, map(_PROGRESS, count.turns), strict=True))
            with _native.Call(count, 1, (count.turn.failed, progress)):
                return method(self, *args, **named)

        return cast("_Method", call)

    return decorate
