"""Masks: the ranks that take part in the rounds of a Buffer agree on who they are, and go on in the same windows.

They agree as for Buffer.shrink(), over the same boards.  Then each begins anew after a round that no rank has seen: it
forgets what a failed round has left in its window, and no rank makes a round before all have done so.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from moecomm.base.experts import experts_of
from moecomm.base.validation import is_integer
from moecomm.errors import Aborted, BadInput, Excluded, MemoryReleased, MoecommError, PeerLost, RoundFailed, Timeout
from moecomm.membership.meeting import ALONE, GRACE_S, Meeting
from moecomm.ranks import last_calls, messages
from moecomm.ranks.board import Board, Part
from moecomm.ranks.messages import Agreed, Coming, Decision, Disagreement, Lost
from moecomm.rounds.expert_tables import LiveExperts
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall

log = logging.getLogger("moecomm")


class Masks:
    """Ranks of a Buffer that take no part in its rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        if rounds.settings.on_timeout == "mask":
            rounds.recover = partial(_recover, weakref.proxy(rounds))

    @property
    def masked(self) -> tuple[int, ...]:
        """Masked ranks, in order: Buffer.masked."""
        return tuple(sorted(self._rounds.masked))

    def mask(self, ranks: Iterable[int] | None, replicas: Mapping[int, int] | None) -> tuple[int, ...]:
        """Mask these ranks, or the ones that all ranks agree on: Buffer.mask()."""
        rounds = self._rounds
        named = None if ranks is None else _checked(rounds, ranks)
        if named is not None and rounds.rank in named:
            raise BadInput("ranks", f"this rank, {rounds.rank}", "others: the ranks that stay call mask()")
        with CollectiveCall(rounds, 0):
            if replicas is not None and rounds.placement is not None:
                raise BadInput("replicas", "experts", "None: the Buffer's placement has replicas")
            if replicas is not None:
                rounds.experts.replicas = _checked_replicas(rounds, replicas)
            if named is not None and not named:
                _update_experts(rounds)
            else:
                Masking(rounds, "mask()", named or ()).hold()
        return self.masked

    def unmask(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Take these ranks in again: Buffer.unmask()."""
        rounds = self._rounds
        joining = _checked(rounds, ranks)
        with CollectiveCall(rounds, 0):
            agreement = Masking(rounds, "unmask()", joining=joining)
            agreement.hold()
            agreement.require_joined()
        return self.masked


def is_masked(rounds: Rounds, rank: int) -> bool:
    """Return whether a rank is masked.  For this rank, reads that from its window, in memory of the device."""
    return rank in rounds.masked if rank != rounds.rank else rounds.session.excluded()


def require_repeats(error: RoundFailed, handle: object = None) -> None:
    """Raise the error of a call, unless all ranks that are left make it again: Buffer(on_timeout="mask").

    `handle`: of the call, which can't be used after a mask.
    """
    if not error.repeats or handle is not None:
        raise error


class Masking(Meeting):
    """An agreement on the ranks that take part.

    Args:
        rounds: of the Buffer.
        call: that the ranks make; ALONE: that this rank makes, ahead of its next call.  It then interrupts the others
            in the round of that call, so that they come, too: those of Buffers that mask by themselves.
        named: ranks to mask, whether they come or not.
        joining: ranks to take in again.

    Raises:
        Closed, BadInput: as Meeting.
        MemoryReleased: memory is released, which only all ranks can take again.
    """

    def __init__(self, rounds: Rounds, call: str, named: Collection[int] = (), joining: Collection[int] = ()) -> None:
        super().__init__(rounds, call)
        if rounds.released:
            raise MemoryReleased
        self._named, self._joining = set(named), sorted(joining)
        self._missed: set[int] = set()
        self._joins = rounds.rank in joining
        self._where = ""  # ranks that did not come to be taken in

    def hold(self) -> Decision:
        """Agree on the ranks that take part, and go on with them.

        Raises:
            Excluded: the others have decided to go on without this rank.
            Mismatch: another rank calls shrink().
            Timeout: this rank wants to be taken in, and no other one answers.
            PeerLost, Timeout: there is no board over which ranks could agree any more.
        """
        with last_calls.noted_beside(self._rounds.ranks, self._call):
            return self._hold()

    def require_joined(self) -> None:
        """Raise PeerLost or Timeout for the first of the ranks that were to be taken in and did not come."""
        rounds = self._rounds
        absent = [rank for rank in self._joining if rank in rounds.masked]
        if absent:
            kind = PeerLost if absent[0] in rounds.session.dead_peers() else Timeout
            text = f"rank {absent[0]} did not come to unmask(), and stays masked{self._where}"
            raise kind(text, rank=rounds.rank, peer=absent[0], phase="agreement", op="unmask", round=0)

    def is_called(self) -> bool:
        """Return whether a rank that takes part waits in the next agreement, which it has begun alone."""
        rounds = self._rounds
        others = sorted(set(range(rounds.num_ranks)) - rounds.masked - {rounds.rank})
        with suppress(MoecommError), self._board(rounds.attempts + 1) as board:
            here = board.look([f"here/{rank}" for rank in others])
            return any(data is not None and messages.unpack(data, Coming).call == ALONE for data in here)
        return False

    def _hold(self) -> Decision:
        rounds = self._rounds
        if not self._joins:
            self.require_member()
        while True:
            if self._joins:
                rounds.attempts = max(rounds.attempts, self._newest())
            decision = self._next()
            if decision is None or (self._joins and decision.masks and rounds.rank not in decision.members):
                continue  # the others have begun another agreement than that in which this rank wants to take part
            if set(self._joining) - set(decision.members):
                self._where = last_calls.others(rounds.ranks)
            if rounds.rank not in decision.members:
                raise self._excluded(decision.members)
            with self._board(rounds.attempts) as board:
                lost = self._begin_anew(board, decision)
            if not lost:
                self._settle(decision)
                return decision
            # A rank that is missed in two attempts may live and only be unreachable.
            self._named |= lost & self._missed
            self._missed |= lost
            self._suspects |= lost

    def _coming(self) -> Coming:
        rounds, coming = self._rounds, super()._coming()
        return coming._replace(
            round=rounds.session.last_round(),
            failed=rounds.calls + 1 if self._call == ALONE else rounds.calls if rounds.repeatable else 0,
            named=sorted(self._named),
            joining=self._joining,
        )

    def _leaves(self, waited_s: float) -> bool:
        if self._joins and waited_s >= self._timeout_s:
            raise self._no_answer()
        return self._joins and self._newest() > self._rounds.attempts - 2

    def _proposal(self, said: Mapping[int, Coming], waited_s: float) -> Decision | Disagreement | None:
        if self._joins:
            return None
        proposal = super()._proposal(said, waited_s)
        if proposal is None and self._call == ALONE:
            taking_part = set(range(self._rounds.num_ranks)) - self._rounds.masked
            missing = taking_part - self._named - said.keys() - self._gone()
            waiting = self._in_rounds() & missing
            # Before the deadline, interrupt nobody while a rank may still be in an earlier round, which would fail.
            if (waiting == missing or waited_s >= self._timeout_s) and not self._rounds.session.excluded():
                for rank in waiting:
                    self._rounds.session.interrupt(rank)
        return proposal

    def _begin_anew(self, board: Board, decision: Decision) -> set[int]:
        """Reset this rank's window and wait for the others; return the ranks that are lost before all have done so.

        Ranks that are left out are told first: they pass no failure on any more.
        """
        members = set(decision.members)
        masked = set(range(self._rounds.num_ranks)) - members
        for rank in masked:
            self._rounds.session.exclude(rank)
        if lost := self._rounds.session.resume(decision.round, masked, self._rounds.attempts):
            board.decide("members", messages.pack(Lost(sorted(lost))))
        else:
            board.write(f"ready/{self._rounds.rank}", b"1")
        lost = self._lost_before(board, "members", "ready", members)
        if not lost and decision.call == ALONE:
            # Until it was ready, a rank that has begun this agreement alone may have interrupted one that had resumed.
            self._rounds.session.forget_interrupts()
            board.write(f"calm/{self._rounds.rank}", b"1")
            lost = self._lost_before(board, "all calm", "calm", members)
        return lost

    def _lost_before(self, board: Board, key: str, word: str, members: Collection[int]) -> set[int]:
        """Wait until all members have written a word; return those that are lost before, alike on all ranks.

        `key`: under which ranks decide that.
        """
        begin = time.monotonic()
        while (went := board.read([key])) is None:
            missing = {rank for rank in members if board.read([f"{word}/{rank}"]) is None}
            waited = time.monotonic() - begin
            lost = missing if waited >= self._timeout_s else missing & self._gone()
            if lost or not missing:
                went = [board.decide(key, messages.pack(Lost(sorted(lost))))]
                break
            board.wait(min(self._timeout_s - waited, GRACE_S))
        return set(messages.unpack(went[0], Lost).ranks)

    def _settle(self, decision: Decision) -> None:
        rounds = self._rounds
        before = rounds.masked
        rounds.resumed(decision.round, frozenset(range(rounds.num_ranks)) - set(decision.members))
        _update_experts(rounds)
        with self._newest_board() as board:
            board.write(str(rounds.rank), messages.pack(Agreed(rounds.attempts)))
        if rounds.masked != before:
            log.warning("rank %d: masked ranks are now %s", rounds.rank, sorted(rounds.masked) or "none")

    def _newest(self) -> int:
        """Return the number of the last agreement that has ended, as far as any rank knows."""
        with self._newest_board() as board:
            found = [board.read([str(rank)]) for rank in range(self._rounds.num_ranks)]
        return max((messages.unpack(one[0], Agreed).number for one in found if one is not None), default=0)

    @contextmanager
    def _newest_board(self) -> Iterator[Board]:
        pages = self._rounds.session.pages
        if pages is not None:
            yield Part(pages, "newest/")
            return
        with self._board(0) as board:
            yield Part(board, "newest/")

    def _no_answer(self) -> Timeout:
        rank, where = self._rounds.rank, last_calls.others(self._rounds.ranks)
        text = f"no rank has called unmask() for rank {rank} within {self._timeout_s} s{where}"
        return Timeout(text, rank=rank, peer=-1, phase="agreement", op="unmask", round=0)


def _recover(rounds: Rounds, error: RoundFailed) -> None:
    """Mask the ranks that a failed round has lost: on_timeout="mask".  Takes note of that in the error.

    After Aborted, only come to an agreement that another rank has begun alone; or where a rank that is masked now had
    interrupted this one on the way to such an agreement, which it does not know to have ended.

    Raises:
        Excluded: the others go on without this rank.
    """
    try:
        masking = Masking(rounds, "mask()")
        if isinstance(error, Aborted) and error.peer not in rounds.masked and not masking.is_called():
            return
        decision = masking.hold()
    except Excluded as excluded:
        raise excluded from error
    except MoecommError as other:  # the Buffer stays failed
        error.args = (f"{error}; and its ranks could not be masked: {other}",)
        return
    names = ", ".join(map(str, sorted(rounds.masked))) or "none"
    error.args = (f"{error}; masked ranks are now {names}, and the next call works",)
    error.repeats = decision.repeats


def _checked_replicas(rounds: Rounds, replicas: Mapping[int, int]) -> dict[int, int]:
    """Return the replicas by the numbers that rounds know experts by.  Raises BadInput."""
    place = {number: number for number in range(rounds.num_experts)}
    if rounds.experts.ids is not None:
        place = {number: at for at, number in enumerate(rounds.experts.ids.kept)}
    wanted = f"expert ids, 0 to {max(place)}, by expert ids"
    if not isinstance(replicas, Mapping):
        raise BadInput("replicas", type(replicas).__name__, wanted)
    for pair in replicas.items():
        if not all(is_integer(number) for number in pair):
            raise BadInput("replicas", pair, wanted)
    count = rounds.experts.count
    if wrong := [pair for pair in replicas.items() if not all(0 <= number < count for number in pair)]:
        raise BadInput("replicas", wrong[0], wanted)
    return {place[int(a)]: place[int(b)] for a, b in replicas.items() if int(a) in place and int(b) in place}


def _update_experts(rounds: Rounds) -> None:
    """Let ids of experts of masked ranks mean their replicas, or none, from the next round on."""
    if (slots := rounds.slots) is not None:
        slots.place(slots.placement, rounds.masked)
        rounds.session.synchronize()
        return
    masked = {expert for rank in rounds.masked for expert in experts_of(rank, rounds.num_experts, rounds.num_ranks)}
    experts = rounds.experts
    if experts.live is None:
        if not masked:
            return
        experts.live = LiveExperts(rounds.num_experts, rounds.device)
    experts.live.update([_meaning(expert, masked, experts.replicas) for expert in range(rounds.num_experts)])


def _meaning(expert: int, masked: Collection[int], replicas: Mapping[int, int]) -> int:
    """Follow replicas from an expert to one that is there; -1: there is none."""
    seen = set()
    while expert in masked:
        if expert in seen or expert not in replicas:
            return -1
        seen.add(expert)
        expert = replicas[expert]
    return expert


def _checked(rounds: Rounds, ranks: Iterable[int]) -> set[int]:
    want = f"ranks, 0 to {rounds.num_ranks - 1}"
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, Mapping)):
        raise BadInput("ranks", type(ranks).__name__, want)
    try:
        found = list(ranks)
    except TypeError as error:  # a tensor without dimensions
        raise BadInput("ranks", type(ranks).__name__, want) from error
    if wrong := [rank for rank in found if not (is_integer(rank) and 0 <= rank < rounds.num_ranks)]:
        raise BadInput("ranks", wrong[0], want)
    return {int(rank) for rank in found}
