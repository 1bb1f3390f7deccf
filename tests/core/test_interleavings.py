"""Agreement over pages in every interleaving of the ranks, which may end anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm.errors import Timeout
from moecomm.membership import meeting
from moecomm.membership.meeting import GRACE_S, Meeting
from moecomm.ranks import opening, pages
from moecomm.ranks.pages import PAGE_BYTES, Pages

from ..few import few
from ..interleavings import Explorer, Run


class Memory:
    """Shared memory in cells: a word each, and two for each text, which is not stored at once."""

    def __init__(self) -> None:
        self.run: Any = None

    def read_word(self, address: int) -> int:
        return self.run.load(address)

    read_long_word = read_word

    def store_word(self, address: int, value: int) -> None:
        self.run.store(address, value)

    def replace_word(self, address: int, old: int, new: int) -> bool:
        return self.run.replace(address, old, new) == old

    def memmove(self, address: int, data: bytes, nbytes: int) -> None:
        assert len(data) == nbytes
        half = max(4, nbytes // 2)
        self.run.store((address, "first half"), data[:half])
        self.run.store((address, "second half"), data[half:])

    def string_at(self, address: int, nbytes: int) -> bytes:
        if (address, "first half") not in self.run.cells:
            address -= 4
            return (self.run.load((address, "first half")) + self.run.load((address, "second half")))[4:][:nbytes]
        return self.run.load((address, "first half"))[:nbytes]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()
    monkeypatch.setattr(pages, "_native", made)
    monkeypatch.setattr(pages, "ctypes", made)
    return made


def words(ranks: int) -> dict[Any, Any]:
    """The contents of pages at first."""
    first: dict[Any, Any] = {}
    for rank in range(ranks):
        own = rank * PAGE_BYTES
        first |= {own + pages.LEFT: 0, own + pages._VERSION: 0, own + pages._DECISION: 0}
        for copy in (0, 1):
            where = own + pages._VALUES + copy * pages._ROOM
            first |= {(where, "first half"): bytes(4), (where, "second half"): b""}
    return first


def explore_decisions(memory: Memory, ranks: int, decisions: int) -> int:
    """Let ranks come to decisions; return the number of states.

    No rank waits for another one, so one that has ended anywhere changes nothing for those that go on.
    """

    def propose(run: Run, rank: int) -> list[bytes]:
        memory.run = run
        own = Pages([one * PAGE_BYTES for one in range(ranks)], rank)
        return [own.decide(f"1/{number}/outcome", b"%d of %d" % (rank, number)) for number in range(decisions)]

    def check(run: Run) -> None:
        found = [rank.result for rank in run.ranks]
        assert all(one == found[0] for one in found), found
        assert [one.split(b" of ")[1] for one in found[0]] == [b"%d" % number for number in range(decisions)]

    programs = [partial(propose, rank=rank) for rank in range(ranks)]
    explorer = Explorer(words(ranks), programs, check)
    explorer.explore()
    return len(explorer.states)


@pytest.mark.parametrize(("ranks", "decisions"), few([(2, 1), (2, 2), (3, 1)], (2, 1), (2, 2)))
def test_one_decision_stands(ranks: int, decisions: int, memory: Memory) -> None:
    assert explore_decisions(memory, ranks, decisions) > 80


def test_a_word_that_is_replaced_in_two_steps_shows(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_word(address: int, old: int, new: int) -> bool:
        if memory.read_word(address) != old:
            return False
        memory.store_word(address, new)
        return True

    monkeypatch.setattr(memory, "replace_word", replace_word)
    with pytest.raises(AssertionError, match="of 0"):
        explore_decisions(memory, ranks=2, decisions=1)


TIMEOUT_S = 1.0


class Board:
    """A Board (moecomm.ranks.board) in cells."""

    limit_s = TIMEOUT_S

    def __init__(self, run: Run, rank: int) -> None:
        self._run, self._rank, self._sleeps = run, rank, 0

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        self._run.store(key, value)
        if instead_of:
            self._run.store(instead_of, None)

    def read(self, keys: list[str]) -> list[bytes] | None:
        found = [self._run.load(key) for key in keys]
        return None if None in found else found

    def read_or(self, keys: list[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        self._run.begin_to_look()  # a turn of the loop begins
        found = self.read(keys)
        return found, None if found is not None else self._run.load(other)

    def look(self, keys: list[str]) -> list[bytes | None]:
        if keys[0].endswith("members"):  # likewise
            self._run.begin_to_look()
        return [self._run.load(key) for key in keys]

    def decide(self, key: str, value: bytes) -> bytes:
        return self._run.replace(key, None, value) or value

    def count(self, key: str, by: int) -> int:
        before = int(self._run.load(key) or b"0")
        if by:
            self._run.store(key, b"%d" % (before + by))
        return before

    def erase(self, keys: list[str]) -> None:
        for key in keys:
            self._run.store(key, None)

    def wait(self, limit_s: float) -> None:
        self._sleeps += 2
        self._run.store(("sleeps", self._rank), self._sleeps - 1)
        self._run.wait()
        self._run.store(("sleeps", self._rank), self._sleeps)

    def close(self) -> None:
        pass


class Survivor(Meeting):
    """A rank that agrees with others on who is left, after an error that names `suspects`."""

    def __init__(self, run: Run, rank: int, ranks: int, suspects: set[int]) -> None:
        self._run, self._suspects, self._timeout_s, self._call = run, set(suspects), TIMEOUT_S, "shrink()"
        self._rounds: Any = SimpleNamespace(rank=rank, num_ranks=ranks, masked=set())

    def _gone(self) -> set[int]:
        me, ranks = self._rounds.rank, self._rounds.num_ranks
        return {rank for rank in range(ranks) if rank != me and self._run.load(("noticed", me, rank))}

    def _in_rounds(self) -> set[int]:
        return set()


class Clocks:
    """In place of the module `time`: each rank has a clock of its own, which goes on while it sleeps."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def monotonic(self) -> float:
        return self._mine.run.load(("clock", self._mine.rank)) or 0.0 if vars(self._mine) else 0.0

    def agree(self, run: Run, rank: int, ranks: int, suspects: set[int]) -> tuple[int, ...]:
        """Return the ranks that go on, as this one finds."""
        self._mine.run, self._mine.rank = run, rank
        decision = Survivor(run, rank, ranks, suspects)._decided(Board(run, rank))  # type: ignore[arg-type]
        assert decision is not None
        return tuple(decision.members)

    def open(self, run: Run, rank: int, ranks: int, calls: int = 1) -> list[bytes]:
        """Open something on all ranks, in one of so many calls; return what each has brought."""
        self._mine.run, self._mine.rank = run, rank
        group = SimpleNamespace(rank=rank, ranks=ranks, in_process=True)
        group.global_ranks, group.board = list, lambda: Board(run, rank)
        for _ in range(calls - 1):
            with suppress(Timeout):
                return opening.gather(group, b"%d" % rank, TIMEOUT_S)  # type: ignore[arg-type]
            run.store("gave up", True)
        return opening.gather(group, b"%d" % rank, TIMEOUT_S)  # type: ignore[arg-type]


def notice(run: Run, rank: int, gone: int, program: int | None) -> None:
    """A rank learns, some time, that another one is gone: since its program was killed, or from the first (None)."""
    while program is not None and not run.load(("killed", program)):
        run.wait()
    run.store(("noticed", rank, gone), True)


def tick(run: Run, rank: int, steps: tuple[float, ...] = (TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)) -> None:
    """The clock of a rank goes on while it sleeps, at any moment, by one step in each sleep."""
    now, sleep = 0.0, 0
    for step in steps:
        while (seen := run.load(("sleeps", rank)) or 0) == sleep or seen % 2 == 0:
            run.wait()
        now, sleep = now + step, seen
        run.store(("clock", rank), now)


def explore(programs: list[Any], ranks: int, check: Callable[[Run], None]) -> int:
    """Run the first `ranks` programs in every interleaving, with each other and the others; return the states."""
    explorer = Explorer({}, programs, check, must_end=ranks)
    explorer.explore()
    return len(explorer.states)


@pytest.mark.parametrize("suspects", few([[{1}, set()], [set(), set()]], [{1}, set()]))
def test_survivors_agree_wherever_a_rank_is_killed(monkeypatch: pytest.MonkeyPatch, suspects: list[set[int]]) -> None:
    killed, ranks, clocks = 1, len(suspects), Clocks()
    monkeypatch.setattr(meeting, "time", clocks)
    agreeing = [partial(clocks.agree, rank=rank, ranks=ranks, suspects=suspects[rank]) for rank in range(ranks)]
    others = [partial(notice, rank=rank, gone=killed, program=killed) for rank in range(ranks) if rank != killed]

    def check(run: Run) -> None:
        found = [rank.result for rank in run.ranks[:ranks] if rank.done]
        living = set(range(ranks)) - {killed}
        assert all(one == found[0] and living <= set(one) for one in found), found

    assert explore([*agreeing, lambda run: run.kill(killed), *others], ranks, check) > 1000


@pytest.mark.parametrize("is_killed", few([False, True], False))
def test_two_survivors_agree_without_a_third(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    """Rank 1 has ended, which the others notice some time, and rank 2 may be killed anywhere, which rank 0 notices."""
    left, clocks = (0, 2), Clocks()
    monkeypatch.setattr(meeting, "time", clocks)
    suspects: dict[int, set[int]] = {0: {1}, 2: set()}
    agreeing = [partial(clocks.agree, rank=rank, ranks=3, suspects=suspects[rank]) for rank in left]

    def check(run: Run) -> None:
        found = [rank.result for rank in run.ranks[:2] if rank.done]
        assert all(one == found[0] for one in found) and (is_killed or found == [left, left]), found
        assert all(0 in one and 1 not in one for one in found), found

    kills = [lambda run: run.kill(1), partial(notice, rank=0, gone=2, program=1)] if is_killed else []
    others = [*kills, *(partial(notice, rank=rank, gone=1, program=None) for rank in left)]
    assert explore([*agreeing, *others], 2, check) > 5000


@pytest.mark.parametrize("suspects", few([[set(), set()], [{1}, set()], [{1}, {0}]], [{1}, {0}]))
def test_ranks_agree_whenever_their_clocks_run_out(monkeypatch: pytest.MonkeyPatch, suspects: list[set[int]]) -> None:
    """A living rank may be left out; then all find so."""
    ranks, clocks = len(suspects), Clocks()
    monkeypatch.setattr(meeting, "time", clocks)
    agreeing = [partial(clocks.agree, rank=rank, ranks=ranks, suspects=suspects[rank]) for rank in range(ranks)]

    def check(run: Run) -> None:
        found = [rank.result for rank in run.ranks[:ranks]]
        assert all(one == found[0] for one in found) and found[0], found

    steps = GRACE_S, TIMEOUT_S
    clock = [partial(tick, rank=rank, steps=steps) for rank in range(ranks)]
    assert explore([*agreeing, *clock], ranks, check) > 1000


def explore_opening(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> int:
    """Open something on two ranks, of which rank 1 may be killed, while their clocks may run out."""
    ranks, clocks = 2, Clocks()
    monkeypatch.setattr(opening, "time", clocks)
    both = [partial(clocks.open, rank=rank, ranks=ranks) for rank in range(ranks)]
    killer = [lambda run: run.kill(1)] if is_killed else []

    def check(run: Run) -> None:
        found = [rank.result for rank in run.ranks[:ranks] if rank.done]
        assert all(one == [b"0", b"1"] for one in found) or all(isinstance(one, Timeout) for one in found), found

    return explore([*both, *killer, *(partial(tick, rank=rank) for rank in range(ranks))], ranks, check)


@pytest.mark.parametrize("leaves_out", [True, False])
def test_ranks_meet_in_the_next_opening_after_one_has_given_up(
    monkeypatch: pytest.MonkeyPatch, leaves_out: bool
) -> None:
    """The clock of rank 0 may run out once.  Rank 1 comes whenever it does, or leaves out the call that fails so."""
    clocks = Clocks()
    monkeypatch.setattr(opening, "time", clocks)

    def check(run: Run) -> None:
        assert [rank.result for rank in run.ranks[:2]] == [[b"0", b"1"]] * 2, [rank.result for rank in run.ranks]

    def second(run: Run) -> list[bytes]:
        while leaves_out and not run.load("gave up"):
            run.wait()
        return clocks.open(run, rank=1, ranks=2, calls=1 if leaves_out else 2)

    programs = [partial(clocks.open, rank=0, ranks=2, calls=2), second, partial(tick, rank=0, steps=(TIMEOUT_S,))]
    assert explore(programs, 2, check) > (300 if leaves_out else 1000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_killed", [False, True])
def test_an_opening_ends_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    assert explore_opening(monkeypatch, is_killed) > 10_000


@pytest.mark.long
def test_an_outcome_that_is_decided_twice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: Board, key: str, value: bytes) -> bytes:
        found = self.read([key])
        if found is None:
            self.write(key, value)
        return value if found is None else found[0]

    monkeypatch.setattr(Board, "decide", decide)
    with pytest.raises(AssertionError, match="Timeout"):
        explore_opening(monkeypatch, is_killed=False)
