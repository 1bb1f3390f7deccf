"""Every interleaving of ranks at their accesses to cells that all of them see: tests/native/interleavings, for Python.

A state is where each rank is, what it has written so far, and read last of each cell, and what the cells hold.  The
program of a rank must be deterministic.  The search is depth first.  It runs the ranks again from the start for each
way to a state that is new; each run goes on to its end, where it is checked.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

_LIMIT_S = 60.0


class Over(BaseException):
    """The run has ended without this rank."""


class Access(NamedTuple):
    """An access to a cell.  `change`: returns what the cell holds afterwards."""

    kind: str
    cell: Hashable
    change: Callable[[Any], Any]
    place: int = 0


class Past(NamedTuple):
    """Attributes:
    place: the lines that it is at, of all calls that it is in.
    written: what it has written.
    read: the cells that it has read, their last values, and how often it has found another.
    """

    place: int = 0
    written: int = 0
    read: int = 0


_BEGIN = Access("begin", None, lambda held: held, 1)


class Rank:
    """A rank of a run: a thread, which goes on when it is its turn."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.next = _BEGIN
        self.past = Past()
        self.known: dict[Hashable, tuple[Any, int]] = {}  # what it has last seen in a cell, and how often another
        self.looked: dict[Hashable, Any] = {}  # since it began to look whether it can go on
        self.waits = self.done = False
        self.result: Any = None


class Run:
    """One run of the ranks.  They call load() and its like from their own threads."""

    def __init__(self, explorer: Explorer, initial: dict[Hashable, Any], programs: list[Callable[[Run], Any]]) -> None:
        self.cells, self._initial, self._explorer = dict(initial), initial, explorer
        self.ranks = [Rank() for _ in programs]
        self._mine = threading.local()
        self._home = threading.Semaphore(0)
        self._over = False
        self._threads = [
            threading.Thread(target=self._body, args=(rank, program), daemon=True)
            for rank, program in zip(self.ranks, programs, strict=True)
        ]

    def go(self) -> bool:
        """Run; return whether all ranks that must have come to their ends."""
        for thread in self._threads:
            thread.start()
        first = self._explorer.choose(self)
        assert first is not None
        first.turn.release()
        assert self._home.acquire(timeout=_LIMIT_S)
        ended = all(rank.done or self.is_killed(rank) for rank in self.ranks[: self._explorer.must_end])
        self._over = True
        for rank in self.ranks:
            if not rank.done:
                rank.turn.release()
        for thread in self._threads:
            thread.join(_LIMIT_S)
        return ended

    def load(self, cell: Hashable) -> Any:
        """Return what a cell holds."""
        return self._access(Access("load", cell, lambda held: held))

    def store(self, cell: Hashable, value: Any) -> None:
        """Store to a cell."""
        self._access(Access("store", cell, lambda held: value))

    def replace(self, cell: Hashable, old: Any, new: Any) -> Any:
        """Store `new` if the cell holds `old`; return what it held."""
        return self._access(Access("replace", cell, lambda held: new if held == old else held))

    def kill(self, rank: int) -> None:
        """End another rank where it is."""
        self.store(("killed", rank), True)

    def is_killed(self, rank: Rank) -> bool:
        """Return whether a rank has been ended."""
        return ("killed", self.ranks.index(rank)) in self.cells

    def begin_to_look(self) -> None:
        """Forget what this rank has seen: wait() waits for what it sees from now on to change."""
        self._mine.rank.looked.clear()

    def wait(self) -> None:
        """Return when a cell that this rank has looked at holds another value."""
        self._mine.rank.waits = True
        self._access(Access("wait", None, lambda held: held))
        self._mine.rank.waits = False
        self.begin_to_look()

    def able(self, rank: Rank) -> bool:
        """Return whether a rank can go on."""
        if rank.done or self.is_killed(rank):
            return False
        return not rank.waits or any(self.cells.get(one) != seen for one, seen in rank.looked.items())

    def past_after(self, rank: Rank) -> Past:
        """Return the past that a rank has after its next access."""
        kind, cell, change, place = rank.next
        _, written, read = rank.past
        if cell is None:
            return Past(place, written, read)
        before, (seen, changes) = self.cells.get(cell), self._known(rank, cell)
        if kind != "load":
            written = hash((written, cell, before, change(before)))
        if before != seen:
            read ^= hash((cell, seen, changes)) ^ hash((cell, before, changes + 1))
        return Past(place, written, read)

    def _known(self, rank: Rank, cell: Hashable) -> tuple[Any, int]:
        return rank.known.get(cell, (self._initial.get(cell), 0))

    def state_after(self, rank: Rank) -> int:
        """Return the state after the next access of a rank."""
        cells = self.cells | {rank.next.cell: rank.next.change(self.cells.get(rank.next.cell))}
        cells.pop(None, None)
        pasts = tuple(self.past_after(one) if one is rank else one.past for one in self.ranks)
        return hash((pasts, frozenset(cells.items())))

    def _access(self, access: Access) -> Any:
        rank = self._mine.rank
        if self._over:  # what it does as it ends
            raise Over
        rank.next = access._replace(place=hash((access.kind, access.cell, _place())))
        self._go_on(rank)
        before = self.cells.get(access.cell)
        after = access.change(before)
        rank.past = self.past_after(rank)
        if access.cell is not None:
            seen, changes = self._known(rank, access.cell)
            rank.known[access.cell] = after, changes + (before != seen)
            self.cells[access.cell] = after
        if access.kind == "load":
            rank.looked[access.cell] = before
        return before

    def _go_on(self, rank: Rank) -> None:
        chosen = self._explorer.choose(self)
        if chosen is rank:
            return
        (self._home if chosen is None else chosen.turn).release()
        self._await_turn(rank)

    def _await_turn(self, rank: Rank) -> None:
        rank.turn.acquire()
        if self._over:
            raise Over

    def _body(self, rank: Rank, program: Callable[[Run], Any]) -> None:
        self._mine.rank = rank
        try:
            self._await_turn(rank)
            rank.past = self.past_after(rank)
            try:
                rank.result = program(self)
            except Exception as error:  # noqa: BLE001 - a result like any other
                rank.result = error
        except Over:
            return
        rank.done = True
        chosen = self._explorer.choose(self)
        (self._home if chosen is None else chosen.turn).release()


class Explorer:
    """Make programs in every interleaving.

    Args:
        initial: what cells hold; None in all others.
        programs: of each rank, called with the Run.
        check: raises AssertionError for a run that is wrong.
        must_end: how many of the first ranks must come to their ends; None: all.
    """

    def __init__(
        self,
        initial: dict[Hashable, Any],
        programs: list[Callable[[Run], Any]],
        check: Callable[[Run], None],
        must_end: int | None = None,
    ) -> None:
        self._initial, self._programs, self._check, self.must_end = initial, programs, check, must_end
        # The chosen ranks, with the states after them, and the others.
        self._path: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
        self._is_deterministic = True
        self._depth, self._seen = 0, False
        self.states: set[int] = set()

    def explore(self) -> None:
        """Make all runs.  Raises AssertionError for the first that is wrong, or in which all ranks wait."""
        while True:
            self._depth, self._seen = 0, False
            run = Run(self, self._initial, self._programs)
            ended = run.go()
            assert self._is_deterministic, "a program has not done the same in two runs"
            assert ended, f"all ranks wait: {[rank.next for rank in run.ranks]}"
            self._check(run)
            if not self._backtrack():
                return

    def choose(self, run: Run) -> Rank | None:
        """Return the rank whose turn it is; None: the run has ended, or all ranks wait."""
        able = [rank for rank in run.ranks if run.able(rank)]
        if not able:
            return None
        if self._depth < len(self._path):
            (number, state), _ = self._path[self._depth]
            self._depth += 1
            self._is_deterministic = run.able(run.ranks[number]) and run.state_after(run.ranks[number]) == state
            return run.ranks[number] if self._is_deterministic else None
        if self._seen:
            return able[0]
        ways = [(run.ranks.index(rank), run.state_after(rank)) for rank in able]
        new = [way for way in ways if way[1] not in self.states]
        if not new:
            self._seen = True  # the run goes on to its end, where it is checked, but finds nothing new
            return able[0]
        chosen = new.pop()
        self.states.add(chosen[1])
        self._path.append((chosen, new))
        self._depth += 1
        return run.ranks[chosen[0]]

    def _backtrack(self) -> bool:
        """Take the last choice that has another way to a state that is new.  Return whether there is one."""
        while self._path:
            _, others = self._path.pop()
            while others:
                chosen = others.pop()
                if chosen[1] not in self.states:
                    self.states.add(chosen[1])
                    self._path.append((chosen, others))
                    return True
        return False


def _place() -> int:
    """Return the calls that this thread is in, and the line of each."""
    frame, place = sys._getframe(1), 0
    while frame is not None:
        place = hash((place, frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return place
