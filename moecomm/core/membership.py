"""Membership: the ranks that are left of a Buffer agree on who they are, and open it again among themselves.

They agree over their pages (moecomm.core.pages), which outlive every process, so no process group is needed.  Ranks
that are threads, or on several hosts, agree over the board of their group.  One decision stands for all: a rank that is
late finds that it is not in it, so there are never two jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from moecomm.core.board import Board, Part
from moecomm.core.expert_tables import ExpertIds
from moecomm.core.experts import experts_of
from moecomm.core.group import Group
from moecomm.core.opening import gather
from moecomm.core.rendezvous import rendezvous
from moecomm.core.rounds import Rounds
from moecomm.core.suspension import Members, refuse_capture
from moecomm.errors import BadInput, Closed, Excluded, MoecommError, PeerLost, Timeout

# For a rank that a peer has named in a Timeout.  It may have waited for another one itself, and then comes at once.
GRACE_S = 0.05


class Shrunk(NamedTuple):
    """Ranks that go on after Buffer.shrink(), and those that do not, by their numbers before.

    Attributes:
        ranks: those that go on.  Their places are their numbers now.
        lost: the others.
    """

    ranks: tuple[int, ...]
    lost: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[int], before: int) -> Shrunk:
        """Make it of the ranks of a group that a caller may have made, of `before` ranks.  Raises BadInput."""
        if any(a >= b for a, b in pairwise(ranks)):
            raise BadInput("group", f"ranks {list(ranks)}, as they were numbered before", "these in ascending order")
        return cls(tuple(ranks), tuple(rank for rank in range(before) if rank not in ranks))


class Survivors:
    """A Group of the ranks that are left.

    Args:
        rank, ranks, in_process: see Group.
        board: makes its board.
        timeout_s: how long a wait for a rank may take.
    """

    def __init__(self, rank: int, ranks: int, in_process: bool, board: Callable[[], Board], timeout_s: float) -> None:
        self.rank, self.ranks, self.in_process = rank, ranks, in_process
        self._board, self._timeout_s = board, timeout_s

    def board(self) -> Board:
        """See Group."""
        return self._board()

    def global_ranks(self) -> list[int]:
        """Return none: the default group may have lost its store."""
        return []

    def all_gather(self, data: bytes) -> list[bytes]:
        """See Group."""
        return gather(self, data, self._timeout_s)


class Meeting:
    """The ranks of a Buffer that shrinks.

    Args:
        rounds: of that Buffer, failed or not.
        members: its ranks.
        call: that the ranks make.

    Raises:
        Closed: the Buffer is closed.
        BadInput: a graph is being captured.
    """

    def __init__(self, rounds: Rounds, members: Members, call: str = "shrink") -> None:
        if rounds.closed:
            raise Closed
        require_idle(rounds, call)
        self._rounds, self._members, self._timeout_s, self._call = rounds, members, members.timeout_s, call
        self._suspects = set(_named(rounds.failure()))
        self._ranks: tuple[int, ...] = ()  # that had agreed to go on

    def attempts(self, group: object = None) -> Iterator[Group]:
        """Yield groups of the ranks that are left, each of fewer than the one before.

        The caller opens each in turn until that does not fail because another rank is gone: see failed().

        Args:
            group: a group of these ranks, if the caller has one.  It is the only one.

        Raises:
            Excluded: the others have decided to go on without this rank.
            PeerLost, Timeout: there is no board over which ranks could agree any more.
        """
        if group is not None:
            yield rendezvous(group)
        while True:
            self._rounds.attempts += 1
            with self._board(self._rounds.attempts) as board:
                self._ranks = self._agree(board)
            if self._rounds.rank not in self._ranks:
                raise Excluded(self._rounds.rank, self._ranks)
            place, in_process = self._ranks.index(self._rounds.rank), self._members.group.in_process
            board_of = self._board_of(self._rounds.attempts)
            yield Survivors(place, len(self._ranks), in_process, board_of, self._timeout_s)

    def lost(self) -> PeerLost | None:
        """Return the error of a rank that is gone since the ranks agreed: opening() knows those that came to it."""
        gone = self._gone()
        lost = next((place for place, rank in enumerate(self._ranks) if rank in gone), None)
        if lost is None:
            return None
        place = self._ranks.index(self._rounds.rank)
        text = f"rank {lost} is gone: its process has ended while the Buffer was opened again"
        return PeerLost(text, rank=place, peer=lost, phase="opening", op="shrink", round=0)

    def failed(self, error: MoecommError) -> None:
        """Take note of an error that has ended an opening: those that it names are gone.  Raise any other error."""
        if not self._ranks or not isinstance(error, (PeerLost, Timeout)) or error.peer < 0:
            raise error
        self._suspects.add(self._ranks[error.peer])

    def _board_of(self, attempt: int) -> Callable[[], Board]:
        pages = self._rounds.session.pages
        if pages is not None:
            return lambda: Part(pages, f"{attempt}/")
        return lambda: Part(self._members.group.board(), f"shrink/{self._members.number}/{attempt}/")

    @contextmanager
    def _board(self, attempt: int) -> Iterator[Board]:
        board = self._board_of(attempt)()
        board.limit_s = self._timeout_s
        try:
            yield board
        except TimeoutError as error:
            raise self._no_board(Timeout, error) from error
        except ConnectionError as error:
            raise self._no_board(PeerLost, error) from error
        finally:
            board.close()

    def _no_board(self, kind: type[PeerLost | Timeout], error: Exception) -> MoecommError:
        text = f"the ranks that are left can't agree, because the store of their group is lost ({error}); pass group="
        return kind(text, rank=self._rounds.rank, peer=-1, phase="agreement", op=self._call, round=0)

    def _agree(self, board: Board) -> tuple[int, ...]:
        everybody = range(self._rounds.num_ranks)
        board.write(f"here/{self._rounds.rank}", packed(self._suspects - {self._rounds.rank}))
        begin = time.monotonic()
        while (decided := board.read(["members"])) is None:
            said = {rank: found[0] for rank in everybody if (found := board.read([f"here/{rank}"])) is not None}
            gone = self._gone() | self._rounds.masked
            here = said.keys() - gone
            suspected = {rank for suspects in said.values() for rank in unpacked(suspects)} - here
            waited = time.monotonic() - begin
            missing = set(everybody) - here - gone - (suspected if waited >= GRACE_S else set())
            if not missing or waited >= self._timeout_s:
                return unpacked(board.decide("members", packed(here)))
            board.wait(min(self._timeout_s - waited, GRACE_S))
        return unpacked(decided[0])

    def _gone(self) -> set[int]:
        """Return the ranks whose process has ended, or that have closed the Buffer."""
        session = self._rounds.session
        left = set() if session.pages is None else session.pages.left()
        return (left | session.dead_peers().keys()) - {self._rounds.rank}


def _named(failure: MoecommError | None) -> Iterator[int]:
    if isinstance(failure, (PeerLost, Timeout)) and failure.peer not in (-1, failure.rank):
        yield failure.peer


def packed(ranks: Collection[int]) -> bytes:
    """Return ranks as bytes; see unpacked()."""
    return ",".join(map(str, sorted(ranks))).encode()


def unpacked(data: bytes) -> tuple[int, ...]:
    """Return the ranks that packed() has packed."""
    return tuple(int(word) for word in data.decode().split(",") if word)


def require_idle(rounds: Rounds, call: str) -> None:
    """Wait for every round so far.  Raises BadInput for a call during a capture."""
    refuse_capture(rounds, call)
    rounds.wait()


def members_of(group: Group, old: Rounds, rounds: Rounds, number: int, timeout_s: float) -> Members:
    """Return the ranks of a Buffer that has been opened again, as they agree on later calls."""
    pages = rounds.session.pages
    if isinstance(group, Survivors) and old.session.pages is not None and pages is not None:
        # The board of the group is in the pages of the old session.  Decisions come in the order of their numbers.
        # Without such pages it is the store, which is kept: it may be in this process, and others may still read it.
        board = lambda: Part(pages, f"{rounds.attempts}/")  # noqa: E731
        group = Survivors(group.rank, group.ranks, group.in_process, board, timeout_s)
    return Members(group, number, timeout_s)


def ids_of(rounds: Rounds, ranks: Sequence[int]) -> ExpertIds:
    """Return the experts of the ranks that are left, by the ids that callers know them by."""
    places = [place for rank in ranks for place in experts_of(rank, rounds.num_experts, rounds.num_ranks)]
    if rounds.ids is None:
        return ExpertIds(places, rounds.num_experts, rounds.device)
    return ExpertIds([rounds.ids.kept[place] for place in places], rounds.ids.count, rounds.device)


def counts_of(rounds: Rounds, ranks: int) -> range:
    """Return the numbers of experts that so many of the ranks may have, whichever they are."""
    each, more = divmod(rounds.num_experts, rounds.num_ranks)
    least, most = max(0, more - (rounds.num_ranks - ranks)), min(more, ranks)
    return range(each * ranks + least, each * ranks + most + 1)


def domain_ranks(ranks: Sequence[int], rounds: Rounds) -> int | None:
    """Return the size of equal domains, as large as can be, each of ranks that were in one domain; None: of all."""
    if rounds.settings.domain_ranks is None:
        return None
    places = [rank // rounds.domain_ranks for rank in ranks]
    return max(
        each
        for each in range(1, len(places) + 1)
        if len(places) % each == 0 and all(len(set(places[i : i + each])) == 1 for i in range(0, len(places), each))
    )
