"""Errors of a Window: from the record that a failed wait leaves behind, or from an abort word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moecomm import _native
from moecomm.errors import Aborted, PeerLost, RoundFailed, Timeout
from moecomm.rounds.failures import Failure, Phase, known_of, stopper

_CULPRIT = 1 << 16  # an abort word is the cause times this, plus the culprit's rank plus 1: csrc/protocol/record.h
_GONE = "its process has ended, or it has closed its Window"
_HOST_BARRIER = _native.constants()["host_barrier"]


def error_of(record: _native.FailureRecordView, dead: Mapping[int, str]) -> RoundFailed:
    """Make the error of a failed wait.  A timeout on a rank that is known to be gone becomes PeerLost.

    `dead`: see moecomm.ranks.peers.Peers.dead_peers.
    """
    barrier = record.phase == Phase.barrier
    known, what = known_of(record, "barrier" if barrier else "wait"), _what(record, barrier)
    if record.code == Failure.peer_lost or record.peer in dead:
        why = dead.get(record.peer, _GONE)
        text = f"rank {record.peer} is gone (noticed by rank {record.rank}, waiting for {what}): {why}"
        return PeerLost(text, **known)
    if record.code == Failure.timeout:
        if record.waited_ns:
            whom = "" if record.peer < 0 else f" of rank {record.peer}"
            text = f"rank {record.rank} waited for {what}{whom}; gave up after {record.waited_ns / 1e9:.1f} s"
        else:
            whom = "" if record.peer < 0 else f" for rank {record.peer}"
            text = f"another rank timed out waiting{whom} (noticed by rank {record.rank}, waiting for {what})"
        return Timeout(text, **known)
    by = stopper(record.rank, record.peer)
    return Aborted(f"rank {record.rank} was stopped by {by} (waiting for {what})", **known)


def error_of_word(word: int, rank: int, dead: Mapping[int, str]) -> RoundFailed:
    """Make the error of a Window whose abort word is set while no call waits."""
    cause, culprit = word // _CULPRIT, word % _CULPRIT - 1
    known: dict[str, Any] = {"rank": rank, "peer": culprit, "op": "wait", "round": 0, "phase": "signal"}
    if cause == Failure.peer_lost or culprit in dead:
        why = dead.get(culprit, _GONE)
        return PeerLost(f"rank {culprit} is gone (noticed by rank {rank}): {why}", **known)
    if cause == Failure.timeout:
        whom = "" if culprit < 0 else f" for rank {culprit}"
        return Timeout(f"a wait{whom} timed out (noticed by rank {rank})", **known)
    return Aborted(f"rank {rank} was stopped by {stopper(rank, culprit)}", **known)


def _what(record: _native.FailureRecordView, barrier: bool) -> str:
    if not barrier:
        return f"signal {record.round} to reach {record.expected}, which holds {record.seen}"
    slot = "" if record.round == _HOST_BARRIER else f" in slot {record.round}"
    return f"barrier {record.expected}{slot}"
