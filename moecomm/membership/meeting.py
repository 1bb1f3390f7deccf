"""Membership: the ranks that are left of a Buffer agree on who they are, and open it again among themselves.

They agree over their pages (moecomm.ranks.pages), which outlive every process, so no process group is needed.  Ranks
that are threads, or on several hosts, agree over the board of their group.  One decision stands for all: a rank that is
late finds that it is not in it, so there are never two jobs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from moecomm.base.experts import experts_of
from moecomm.errors import BadInput, Closed, Excluded, Mismatch, MoecommError, PeerLost, Timeout
from moecomm.membership.suspension import refuse_capture
from moecomm.ranks import messages
from moecomm.ranks.board import Board, Part
from moecomm.ranks.group import Group, Members
from moecomm.ranks.messages import Coming, Decision, Disagreement
from moecomm.ranks.opening import gather
from moecomm.ranks.pages import Pages
from moecomm.rounds.expert_tables import ExpertIds
from moecomm.rounds.rounds import Rounds

_KEPT = 4  # agreements whose words a rank keeps: others may still read them

# For a rank that a peer has named in a Timeout.  It may have waited for another one itself, and then comes at once.
GRACE_S = 0.05
COMES_S = 1.0  # for a rank whose round has failed

ALONE = "mask() of one rank"  # an agreement that a rank begins alone: see moecomm.membership.pending


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
        """Make the result from a group that a caller may have made, of `before` ranks.  Raises BadInput."""
        if list(ranks) != sorted(set(ranks)):
            raise BadInput("group", f"ranks {list(ranks)}, as they were numbered before", "these in ascending order")
        return cls(tuple(ranks), tuple(sorted(set(range(before)).difference(ranks))))


class Survivors:
    """A Group of the ranks that are left.

    Args:
        rank, ranks, in_process: see Group.
        origin: makes boards, for a prefix: those of the group that its ranks are left of, or parts of their pages.
        prefix: of all its boards.
        timeout_s: how long a wait for a rank may take.
    """

    def __init__(
        self, rank: int, ranks: int, in_process: bool, origin: Callable[[str], Board], prefix: str, timeout_s: float
    ) -> None:
        self.rank, self.ranks, self.in_process = rank, ranks, in_process
        self.origin, self.prefix, self._timeout_s = origin, prefix, timeout_s

    def board(self, prefix: str = "") -> Board:
        return self.origin(self.prefix + prefix)

    def global_ranks(self) -> list[int]:
        """Return none: the default group may have lost its store."""
        return []

    def all_gather(self, data: bytes) -> list[bytes]:
        return gather(self, data, self._timeout_s)


class Meeting:
    """The ranks of a Buffer that agree on who goes on.

    Agreements are numbered, and take two boards each: of shrink() for the decision and for the opening, of mask() for
    the decision and for the new beginning.  Ranks that made different calls find that on the first, all of them raise
    Mismatch, and the next agreement has the same number everywhere.

    Args:
        rounds: of that Buffer, failed or not.
        call: that the ranks make, with its parentheses.

    Attributes:
        ranks: that have agreed to go on; none: not yet, or they are those of the caller's group.

    Raises:
        Closed: the Buffer is closed.
        BadInput: a graph is being captured.
    """

    def __init__(self, rounds: Rounds, call: str) -> None:
        if rounds.closed:
            raise Closed
        self._op = call.partition("(")[0]
        require_idle(rounds, self._op)
        self._rounds, self._call = rounds, call
        self._timeout_s = rounds.members.timeout_s
        self._failure = failure = rounds.failure()
        self._suspects: set[int] = set()
        if isinstance(failure, (PeerLost, Timeout)) and failure.peer not in (-1, failure.rank):
            self._suspects.add(failure.peer)
        self.ranks: tuple[int, ...] = ()
        group, pages = rounds.members.group, rounds.session.pages
        self._origin: Callable[[str], Board] = group.board
        self._prefix = f"shrink/{rounds.members.number}/"
        if pages is not None:
            self._origin, self._prefix = partial(Part, pages), ""
        elif isinstance(group, Survivors):
            self._origin, self._prefix = group.origin, group.prefix + self._prefix

    def survivors(self) -> Survivors:
        """Agree on the ranks that are left; each time on fewer of them.

        The caller opens them in turn until that does not fail because another rank is gone: see suspect().

        Raises:
            Excluded: the others have decided to go on without this rank.
            Mismatch: another rank makes another call.
            PeerLost, Timeout: there is no board over which ranks could agree any more.
        """
        rounds, decision = self._rounds, self._next()
        assert decision is not None  # this rank waits for no other agreement
        self.ranks = tuple(decision.members)
        if rounds.rank not in self.ranks:
            raise self._excluded(self.ranks)
        place, in_process = self.ranks.index(rounds.rank), rounds.members.group.in_process
        prefix = f"{self._prefix}{rounds.attempts}/"
        return Survivors(place, len(self.ranks), in_process, self._origin, prefix, self._timeout_s)

    def require_member(self) -> None:
        """Raise Excluded, at once, if the others have gone on without this rank: it must decide nothing any more."""
        if isinstance(self._failure, Excluded):
            raise self._failure
        if self._rounds.session.excluded():
            raise self._excluded(())

    def _excluded(self, ranks: Sequence[int]) -> Excluded:
        error = Excluded(self._rounds.rank, tuple(ranks))
        self._rounds.fail(error)
        return error

    def lost(self) -> PeerLost | None:
        """Return the error of a rank that is gone since the ranks agreed: opening() knows those that came to it."""
        if not (gone := self._gone().intersection(self.ranks)):
            return None
        lost = min(map(self.ranks.index, gone))
        place = self.ranks.index(self._rounds.rank)
        text = f"rank {lost} is gone: its process has ended while the Buffer was opened again"
        return PeerLost(text, rank=place, peer=lost, phase="opening", op="shrink", round=0)

    def suspect(self, error: PeerLost | Timeout) -> None:
        """Mark the rank that a failed opening names as suspect.  Raise an error that names none."""
        if error.peer < 0:
            raise error
        self._suspects.add(self.ranks[error.peer])

    @contextmanager
    def _board(self, attempt: int) -> Iterator[Board]:
        board = self._origin(f"{self._prefix}{attempt}/")
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
        return kind(text, rank=self._rounds.rank, peer=-1, phase="agreement", op=self._op, round=0)

    def _next(self) -> Decision | None:
        """Join the next agreement; see _decided().  Without a decision, this rank's next call joins the same one again.

        So ranks that gave up, and ranks that made other calls meanwhile, meet at the next call.
        """
        rounds = self._rounds
        rounds.attempts += 2
        if rounds.session.pages is not None:
            self._forget(rounds.session.pages)
        try:
            with self._board(rounds.attempts - 1) as board:
                return self._decided(board)
        except Mismatch:  # is decided
            raise
        except BaseException:
            with suppress(MoecommError), self._board(rounds.attempts - 1) as board:
                board.limit_s = 0.0 if rounds.session.pages is None else self._timeout_s
                board.erase([f"here/{rounds.rank}"])
            rounds.attempts -= 2
            raise

    def _decided(self, board: Board) -> Decision | None:
        """Agree over a board; return the decision that stands, or None if this rank is no part of it and _leaves().

        Raises:
            Mismatch: another rank makes another call.
        """
        board.write(f"here/{self._rounds.rank}", messages.pack(self._coming()))
        keys = ["members", *map("here/".__add__, map(str, range(self._rounds.num_ranks)))]
        begin = time.monotonic()
        while True:
            decided, *here = board.look(keys)
            if decided is not None:
                break
            said = {other: messages.unpack(data, Coming) for other, data in enumerate(here) if data is not None}
            waited = time.monotonic() - begin
            if self._leaves(waited):
                return None
            if (proposal := self._proposal(said, waited)) is not None:
                decided = board.decide("members", messages.pack(proposal))
                break
            left = self._timeout_s - waited
            board.wait(min(left, GRACE_S) if left > 0 else GRACE_S)
        stands: Any = messages.unpack(decided, Decision, Disagreement)
        if isinstance(stands, Disagreement):
            calls = dict(zip(stands.ranks, (stands.first, stands.second), strict=True))
            rank = next(rank for rank, call in calls.items() if _kind(call) != _kind(self._call))
            raise Mismatch("call", self._call, calls[rank], rank)
        assert isinstance(stands, Decision)
        return stands

    def _coming(self) -> Coming:
        """Return the message of this rank to the others."""
        return Coming(self._call, 0, 0, sorted(self._suspects - {self._rounds.rank}), [], [])

    def _leaves(self, waited_s: float) -> bool:
        """Return whether this rank gives up this agreement for the next one.  Participants never do."""
        return False

    def _proposal(self, said: Mapping[int, Coming], waited_s: float) -> Decision | Disagreement | None:
        """Return the decision that the ranks that have come so far allow; None: wait for more."""
        gone = self._gone()
        there = sorted(said.keys() - gone - self._rounds.masked)
        for rank in there:
            calls = said[rank].call, said[there[0]].call
            if calls[0] != calls[1] and _kind(calls[0]) != _kind(calls[1]):
                return Disagreement([there[0], rank], said[there[0]].call, said[rank].call)
        wanted = _wanted(self._rounds, said)
        here = {rank: said[rank] for rank in sorted(said.keys() & wanted - gone)}
        missing = wanted - here.keys() - gone
        if missing and waited_s >= GRACE_S:
            missing = missing.difference(*(coming.suspects for coming in here.values()))
        if missing and waited_s >= self._timeout_s:
            # A rank that began a round as late as can be gives it up after another timeout, and needs a moment to come.
            missing &= self._in_rounds() if waited_s < 2 * self._timeout_s + COMES_S else set()
        return None if missing else _decision(self._call, here)

    def _forget(self, pages: Pages) -> None:
        """Remove this rank's words of old agreements from its page."""
        rank, old = self._rounds.rank, self._rounds.attempts - _KEPT
        pages.erase([f"{old - 1}/here/{rank}", f"{old}/ready/{rank}", f"{old}/calm/{rank}"])

    def _gone(self) -> set[int]:
        """Return the ranks whose process has ended, or that have closed the Buffer."""
        session = self._rounds.session
        left: set[int] = set()
        if session.pages is not None:
            left = session.pages.left()
        else:  # ranks that are threads, or on several hosts: the round header of a rank that leaves says so
            with suppress(RuntimeError):  # the device does not answer
                left = {rank for rank, op in enumerate(session.begun()) if op == "close"}
        return (left | session.dead_peers().keys()) - {self._rounds.rank}

    def _in_rounds(self) -> set[int]:
        """Return the ranks that are in a round and wait for this rank.  They join the agreement after their deadline.

        Empty if a round has failed here: then no rank waits for this one.  One that was invalid on all ranks has not
        failed.
        """
        with suppress(RuntimeError):  # the device does not answer
            if not self._rounds.failed:
                return {rank for rank, op in enumerate(self._rounds.session.begun()) if op not in ("", "close")}
        return set()


def _kind(call: str) -> str:
    """Return the kind of agreement of a call.  mask() and unmask() share one, so that ranks can mix them."""
    return "mask()" if call in ("unmask()", ALONE) else call


def _wanted(rounds: Rounds, said: Mapping[int, Coming]) -> set[int]:
    """Return the ranks that are to take part.  Where ranks name each other, the lower one's word counts."""
    taking_part = set(range(rounds.num_ranks)) - rounds.masked
    named: set[int] = set()
    joining: set[int] = set()
    for rank in sorted(said.keys() & taking_part):
        if rank not in named:
            named.update(said[rank].named)
            joining.update(said[rank].joining)
    return (taking_part | joining) - named


def _decision(call: str, here: Mapping[int, Coming]) -> Decision:
    failed = {coming.failed for rank, coming in here.items() if rank not in coming.joining}
    # A round may have begun after the last that has ended; no rank has seen the one after that.
    last = max([coming.round for coming in here.values()], default=0)  # nobody is left if this rank has named itself
    call = ALONE if any(coming.call == ALONE for coming in here.values()) else call
    return Decision(call, list(here), last + 2, len(failed) == 1 and 0 not in failed)


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
        opened = weakref.proxy(rounds)  # which refers to its ranks itself
        board = lambda prefix: Part(pages, f"{opened.attempts}/{prefix}")  # noqa: E731
        group = Survivors(group.rank, group.ranks, group.in_process, board, "", timeout_s)
    return Members(group, number, timeout_s)


def ids_of(rounds: Rounds, ranks: Sequence[int]) -> ExpertIds:
    """Return the experts of the ranks that are left, by the ids that callers know them by."""
    places = [place for rank in ranks for place in experts_of(rank, rounds.num_experts, rounds.num_ranks)]
    if rounds.experts.ids is None:
        return ExpertIds(places, rounds.num_experts, rounds.device)
    return ExpertIds([rounds.experts.ids.kept[place] for place in places], rounds.experts.ids.count, rounds.device)


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
