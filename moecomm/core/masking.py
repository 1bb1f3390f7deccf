"""Masks: the ranks that take part in the rounds of a Buffer agree on who they are, and go on in the same windows.

They agree as for Buffer.shrink(), over the same boards.  Then each begins anew after a round that no rank has seen: it
forgets what a failed round has left in its window, and no rank makes a round before all have done so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from moecomm.core.board import Board, Part
from moecomm.core.expert_tables import LiveExperts
from moecomm.core.experts import experts_of
from moecomm.core.integers import is_integer
from moecomm.core.membership import GRACE_S, Meeting, packed, unpacked
from moecomm.core.rounds import Rounds
from moecomm.core.suspension import Members
from moecomm.errors import BadInput, Excluded, MoecommError, PeerLost, RoundFailed, Timeout

log = logging.getLogger("moecomm")

_KEPT = 4  # agreements whose words a rank keeps: others may still read them


class Coming(NamedTuple):
    """Wishes of a rank in an agreement.

    Attributes:
        round: the last that has ended here.
        call: number of the call that has failed and could be repeated, since the last agreement; 0: none.
        suspects: ranks that are left out unless they come.
        named: ranks that are left out.
        joining: ranks that are taken in again.
    """

    round: int
    call: int
    suspects: list[int]
    named: list[int]
    joining: list[int]


class Decision(NamedTuple):
    """An agreement that stands.

    Attributes:
        members: ranks that take part.
        round: after which they go on.
        repeats: all have failed in the same call, which they make again.
    """

    members: list[int]
    round: int
    repeats: bool


class Masking(Meeting):
    """An agreement on the ranks that take part.

    Args:
        rounds: of the Buffer.
        members: all of its ranks.
        call: that the ranks make.
        named: ranks to mask, whether they come or not.
        joining: ranks to take in again.

    Raises:
        Closed, BadInput: as Meeting.
    """

    def __init__(
        self, rounds: Rounds, members: Members, call: str, named: Collection[int] = (), joining: Collection[int] = ()
    ) -> None:
        super().__init__(rounds, members, call)
        self._named, self._joining = set(named), sorted(joining)
        self._missed: set[int] = set()
        self._joins = rounds.rank in joining

    def hold(self) -> Decision:
        """Agree, and go on.

        Raises:
            Excluded: the others have decided to go on without this rank.
            Timeout: this rank wants to be taken in, and no other one answers.
            PeerLost, Timeout: there is no board over which ranks could agree any more.
        """
        rounds = self._rounds
        while True:
            if self._joins:
                rounds.attempts = max(rounds.attempts, self._newest())
            rounds.attempts += 2
            self._forget()
            with self._board_at(-1) as board:
                decision = self._decision(board)
            if decision is None:
                continue
            if rounds.rank not in decision.members:
                error = Excluded(rounds.rank, tuple(decision.members))
                rounds.fail(error)
                raise error
            with self._board_at(0) as board:
                lost = self._begin_anew(board, decision)
            if not lost:
                self._settle(decision)
                return decision
            # A rank that is missed in two attempts may live and only be unreachable.
            self._named |= lost & self._missed
            self._missed |= lost
            self._suspects |= lost

    def _decision(self, board: Board) -> Decision | None:
        """Agree on who takes part; None: this rank wants to, and the others have begun another agreement."""
        rounds, begin = self._rounds, time.monotonic()
        board.write(f"here/{rounds.rank}", json.dumps(self._coming()).encode())
        while (decided := board.read(["members"])) is None:
            said = {
                rank: Coming(*json.loads(found[0]))
                for rank in range(rounds.num_ranks)
                if (found := board.read([f"here/{rank}"])) is not None
            }
            gone, wanted = self._gone(), _wanted(rounds, said)
            here = {rank: said[rank] for rank in sorted(said.keys() & wanted - gone)}
            suspected = {rank for coming in here.values() for rank in coming.suspects} - here.keys()
            waited = time.monotonic() - begin
            missing = wanted - here.keys() - gone - (suspected if waited >= GRACE_S else set())
            if self._joins:
                if waited >= self._timeout_s:
                    raise self._no_answer()
                if self._newest() > rounds.attempts - 2:
                    return None
            elif not missing or waited >= self._timeout_s:
                decided = [board.decide("members", json.dumps(_decided(here)).encode())]
                break
            board.wait(min(self._timeout_s - waited, GRACE_S))
        try:
            decision = Decision(*json.loads(decided[0]))
        except (TypeError, ValueError):
            raise Excluded(rounds.rank, ()) from None  # the others have called shrink()
        return None if self._joins and rounds.rank not in decision.members else decision

    def _coming(self) -> Coming:
        rounds = self._rounds
        call = rounds.calls if rounds.repeatable else 0
        suspects = sorted(self._suspects - {rounds.rank})
        return Coming(self._rounds.session.last_round(), call, suspects, sorted(self._named), self._joining)

    def _begin_anew(self, board: Board, decision: Decision) -> set[int]:
        """Reset this rank's window and wait for the others; return the ranks that are lost before all have done so.

        Ranks that are left out are told first: they pass no failure on any more.
        """
        members = set(decision.members)
        masked = set(range(self._rounds.num_ranks)) - members
        for rank in masked:
            self._rounds.session.exclude(rank)
        if lost := self._rounds.session.resume(decision.round, masked, self._rounds.attempts):
            board.decide("members", packed(lost))
        else:
            board.write(f"ready/{self._rounds.rank}", b"1")
        begin = time.monotonic()
        while (went := board.read(["members"])) is None:
            missing = {rank for rank in members if board.read([f"ready/{rank}"]) is None}
            waited = time.monotonic() - begin
            lost = missing if waited >= self._timeout_s else missing & self._gone()
            if lost or not missing:
                went = [board.decide("members", packed(lost) or b"-")]
                break
            board.wait(min(self._timeout_s - waited, GRACE_S))
        return set() if went[0] == b"-" else set(unpacked(went[0]))

    def _settle(self, decision: Decision) -> None:
        rounds = self._rounds
        before = rounds.masked
        rounds.resumed(decision.round, frozenset(range(rounds.num_ranks)) - set(decision.members))
        update_experts(rounds)
        with self._newest_board() as board:
            board.write(str(rounds.rank), b"%d" % rounds.attempts)
        if rounds.masked != before:
            log.warning("rank %d: masked ranks are now %s", rounds.rank, sorted(rounds.masked) or "none")

    def _newest(self) -> int:
        """Return the number of the last agreement that has ended, as far as any rank knows."""
        with self._newest_board() as board:
            found = [board.read([str(rank)]) for rank in range(self._rounds.num_ranks)]
        return max((int(one[0]) for one in found if one is not None), default=0)

    def _forget(self) -> None:
        pages, old = self._rounds.session.pages, self._rounds.attempts - _KEPT
        if pages is not None:
            rank = self._rounds.rank
            pages.erase([f"{old - 1}/here/{rank}", f"{old}/ready/{rank}"])

    @contextmanager
    def _board_at(self, offset: int) -> Iterator[Board]:
        with self._board(self._rounds.attempts + offset) as board:
            yield board

    @contextmanager
    def _newest_board(self) -> Iterator[Board]:
        pages = self._rounds.session.pages
        if pages is not None:
            yield Part(pages, "newest/")
            return
        with self._board(0) as board:
            yield Part(board, "newest/")

    def _no_answer(self) -> Timeout:
        text = f"no rank has called unmask() for rank {self._rounds.rank} within {self._timeout_s} s"
        return Timeout(text, rank=self._rounds.rank, peer=-1, phase="agreement", op="unmask", round=0)


def recover(rounds: Rounds, members: Members, error: RoundFailed) -> None:
    """Mask the ranks that a failed round has lost: on_timeout="mask".  Takes note of that in the error.

    Raises:
        Excluded: the others go on without this rank.
    """
    try:
        decision = Masking(rounds, members, "mask").hold()
    except Excluded as excluded:
        raise excluded from error
    except MoecommError as other:  # the Buffer stays failed
        error.args = (f"{error}; and its ranks could not be masked: {other}",)
        return
    names = ", ".join(map(str, sorted(rounds.masked))) or "none"
    error.args = (f"{error}; masked ranks are now {names}, and the next call works",)
    error.repeats = decision.repeats


def require_members(rounds: Rounds, joining: Collection[int]) -> None:
    """Raise PeerLost or Timeout for the first of the ranks that were to be taken in and did not come."""
    absent = [rank for rank in sorted(joining) if rank in rounds.masked]
    if absent:
        kind = PeerLost if absent[0] in rounds.session.dead_peers() else Timeout
        text = f"rank {absent[0]} did not come to unmask(), and stays masked"
        raise kind(text, rank=rounds.rank, peer=absent[0], phase="agreement", op="unmask", round=0)


def checked_replicas(rounds: Rounds, replicas: Mapping[int, int]) -> dict[int, int]:
    """Return the replicas by the numbers that rounds know experts by.  Raises BadInput."""
    place = {number: number for number in range(rounds.num_experts)}
    if rounds.ids is not None:
        place = {number: at for at, number in enumerate(rounds.ids.kept)}
    wanted = f"expert ids, 0 to {max(place)}, by expert ids"
    if not isinstance(replicas, Mapping):
        raise BadInput("replicas", type(replicas).__name__, wanted)
    for pair in replicas.items():
        if not all(is_integer(number) for number in pair):
            raise BadInput("replicas", pair, wanted)
    count = rounds.num_experts if rounds.ids is None else rounds.ids.count
    if wrong := [pair for pair in replicas.items() if not all(0 <= number < count for number in pair)]:
        raise BadInput("replicas", wrong[0], wanted)
    return {place[int(a)]: place[int(b)] for a, b in replicas.items() if int(a) in place and int(b) in place}


def update_experts(rounds: Rounds) -> None:
    """Let ids of experts of masked ranks mean their replicas, or none, from the next round on."""
    masked = {expert for rank in rounds.masked for expert in experts_of(rank, rounds.num_experts, rounds.num_ranks)}
    if rounds.live is None:
        if not masked:
            return
        rounds.live = LiveExperts(rounds.num_experts, rounds.device)
    rounds.live.update([_meaning(expert, masked, rounds.replicas) for expert in range(rounds.num_experts)])


def _meaning(expert: int, masked: Collection[int], replicas: Mapping[int, int]) -> int:
    """Follow replicas from an expert to one that is there; -1: there is none."""
    seen = set()
    while expert in masked:
        if expert in seen or expert not in replicas:
            return -1
        seen.add(expert)
        expert = replicas[expert]
    return expert


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


def _decided(here: Mapping[int, Coming]) -> Decision:
    calls = {coming.call for coming in here.values()}
    # A round may have begun after the last that has ended; no rank has seen the one after that.
    last = max((coming.round for coming in here.values()), default=0)  # nobody is left if this rank has named itself
    return Decision(list(here), last + 2, len(calls) == 1 and 0 not in calls)
