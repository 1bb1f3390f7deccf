"""The counters of a Buffer: those of this rank, or of all ranks."""

from __future__ import annotations

import struct

from moecomm.base.experts import experts_of
from moecomm.base.validation import check_flag
from moecomm.errors import Closed, Timeout
from moecomm.membership.suspension import exchange, refuse_capture
from moecomm.observe.stats.counters import Beside, JobStats, Stats
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective

_BESIDE = struct.Struct("<qq")


class Counters:
    """The counters of a Buffer's rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def read(self, gather: bool, reset: bool) -> Stats | JobStats:
        check_flag("gather", gather)
        return _gathered(self._rounds, reset) if gather else _own(self._rounds, reset)

    def reset(self) -> None:
        _own(self._rounds, True)


@collective(rounds=0)
def _own(rounds: Rounds, reset: bool) -> Stats:
    words, beside = _read(rounds, reset)
    if reset:
        _reset(rounds)
    return _stats(rounds, rounds.rank, words, beside)


@collective(rounds=0)
def _gathered(rounds: Rounds, reset: bool) -> JobStats:
    if rounds.closed:
        raise Closed
    with exchange(rounds, "stats") as ranks:
        words, beside = _read(rounds, reset)
        everybody = ranks.all_gather(_BESIDE.pack(*beside) + words)
        ranks.settle()
    if reset:
        _reset(rounds)
    return JobStats.of_ranks(
        [
            _stats(rounds, rank, data[_BESIDE.size :], Beside(*_BESIDE.unpack_from(data)))
            for rank, data in enumerate(everybody)
        ]
    )


def _read(rounds: Rounds, reset: bool) -> tuple[bytes, Beside]:
    """Return the words of this rank's counters, and the counters beside them."""
    check_flag("reset", reset)
    if rounds.closed:
        raise Closed
    refuse_capture(rounds, "stats")
    session = rounds.session
    session.synchronize()
    words = session.read_counters()
    if words is None:
        text = f"rank {rounds.rank} could not read its counters: the device does not answer"
        raise Timeout(text, rank=rounds.rank, peer=rounds.rank, phase="counters", op="stats", round=0)
    return words, Beside(rounds.flight.retries, rounds.experts.absent.read())


def _reset(rounds: Rounds) -> None:
    """Count from 0 again, after a _read(): no round of this rank has come in between."""
    rounds.session.order()
    rounds.session.counters().zero_()
    rounds.flight.retries = 0
    rounds.experts.absent.reset()


def _stats(rounds: Rounds, rank: int, words: bytes, beside: Beside) -> Stats:
    experts = experts_of(rank, rounds.num_experts, rounds.num_ranks)
    return Stats.of_words(words, rounds.num_ranks, len(experts), beside)
