"""The part of a Buffer that returns its counters."""

from __future__ import annotations

import struct
from typing import Literal, overload

from moecomm.base.experts import experts_of
from moecomm.base.validation import check_flag
from moecomm.errors import Closed, Timeout
from moecomm.membership.suspension import Members, agreement, refuse_capture
from moecomm.observe.stats.counters import Beside, JobStats, Stats
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective

_BESIDE = struct.Struct("<qq")


class Counted:
    """Calls of a Buffer about its counters."""

    rounds: Rounds
    _members: Members

    @overload
    def stats(self, *, gather: Literal[False] = False, reset: bool = False) -> Stats: ...
    @overload
    def stats(self, *, gather: Literal[True], reset: bool = False) -> JobStats: ...
    def stats(self, *, gather: bool = False, reset: bool = False) -> Stats | JobStats:
        """Return the counters of this rank: rounds, rows, bytes, rows of each expert, and waits for each peer.

        Rounds count always, on the device, also when a captured graph replays.  This call waits for the rounds so far,
        on this rank.  After a failed round it still works.

        Args:
            gather: True: those of all ranks.  Collective then, over the sockets of the group, not in rounds.
            reset: True: count from 0 again, after reading.

        Raises:
            Closed, ConcurrentCall: as everywhere.
            BadInput: a call during a capture.
            Timeout: the device does not answer.
            Timeout, PeerLost, Aborted: of `gather`: not all ranks came.
        """
        check_flag("gather", gather)
        check_flag("reset", reset)
        return _gathered(self.rounds, self._members, reset) if gather else _own(self.rounds, reset)

    def reset_stats(self) -> None:
        """Count from 0 again on this rank, after the rounds so far.

        Raises:
            As stats().
        """
        _own(self.rounds, True)


@collective(rounds=0)
def _own(rounds: Rounds, reset: bool) -> Stats:
    refuse_capture(rounds, "stats")
    return _stats(rounds, rounds.rank, *_read(rounds, reset))


@collective(rounds=0)
def _gathered(rounds: Rounds, members: Members, reset: bool) -> JobStats:
    refuse_capture(rounds, "stats")
    words, beside = _read(rounds, reset)
    with agreement(rounds, members, "stats") as ranks:
        everybody = ranks.all_gather(_BESIDE.pack(*beside) + words)
        ranks.settle()
    return JobStats.of_ranks(
        [
            _stats(rounds, rank, data[_BESIDE.size :], Beside(*_BESIDE.unpack_from(data)))
            for rank, data in enumerate(everybody)
        ]
    )


def _read(rounds: Rounds, reset: bool) -> tuple[bytes, Beside]:
    """Return the words of this rank's counters, and the counters beside them."""
    if rounds.closed:
        raise Closed
    session = rounds.session
    session.synchronize()
    words = session.read_counters()
    if words is None:
        text = f"rank {rounds.rank} could not read its counters: the device does not answer"
        raise Timeout(text, rank=rounds.rank, peer=rounds.rank, phase="counters", op="stats", round=0)
    beside = Beside(rounds.retries, rounds.absent.read(reset=reset))
    if reset:
        session.order()
        session.counters().zero_()
        rounds.retries = 0
    return words, beside


def _stats(rounds: Rounds, rank: int, words: bytes, beside: Beside) -> Stats:
    experts = experts_of(rank, rounds.num_experts, rounds.num_ranks)
    return Stats.of_words(words, rounds.num_ranks, len(experts), beside)
