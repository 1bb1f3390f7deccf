"""Failure records: from the 64 bytes that a failed round leaves behind to a named error."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from moecomm import _native
from moecomm.base.protocol import GENERATION, ROUND_HEADER_BYTES
from moecomm.errors import (
    Aborted,
    BadInput,
    Excluded,
    Mismatch,
    MoecommError,
    OutOfStep,
    PeerLost,
    Timeout,
    TooManyRows,
)
from moecomm.rounds import signature

Failure, Argument, Phase = _native.Failure, _native.Argument, _native.Phase
_FIELDS = ("code", "op", "phase", "argument", "rank", "peer", "round", "expected", "seen", "waited_ns")
_HEADER_WORDS = ROUND_HEADER_BYTES // 4
_OPS = ("no operation", "dispatch", "combine", "close")
_PHASES = {
    Phase.header: "its round header and counts",
    Phase.payload: "its rows",
    Phase.reduced: "its reduced rows",
    Phase.drained: "the signal that its reads of earlier rows have ended",
    Phase.grid: "the other blocks of this rank",
}


def round_failed(context: _native.Context) -> bool:
    """Return whether a round of this rank failed or was aborted, so that none can follow; not for an invalid round.

    The ranks whose round failed, too, know of it.  Of an abort() outside of rounds none knows.
    """
    record = _native.record(context.record)
    return record is not None and record.code in (
        Failure.timeout,
        Failure.peer_lost,
        Failure.aborted,
        Failure.excluded,
    )


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler has raised an error, or might have: no other rank makes the same one.

    Of errors that calls raise as well, the frame of the handler is in the traceback.
    """
    if not isinstance(error, Exception):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def begun_ops(words: Iterable[bytes], last_round: int) -> list[str]:
    """Return the operations of round headers, by their first tagged words; "": not of the round after `last_round`."""
    expected: bytes = _native.leave_words(last_round, _HEADER_WORDS)[4:8]
    ops = dict(enumerate(_OPS))
    return [ops.get(word[0] & 0xF, "") if word[4:8] == expected else "" for word in words]  # RoundHeader::op


def fields(record: _native.FailureRecordView) -> dict[str, int | str]:
    """Return the fields of a record by their names in csrc/protocol/record.h; code, op and phase in words."""
    found: dict[str, int | str] = {name: getattr(record, name) for name in _FIELDS}
    named = {"code": Failure(record.code).name, "op": _OPS[record.op], "phase": Phase(record.phase).name}
    return found | named


def error_of(record: _native.FailureRecordView, dead: Mapping[int, str], last: str = "") -> MoecommError:
    """Make the error of a record.  A timeout on a rank that is known to be gone becomes PeerLost.

    Args:
        record: of this rank.
        dead: see Session.dead_peers.
        last: the error with which the record's peer has ended; "": not known.
    """
    if record.code == Failure.bad_input:
        return _bad_input(record)
    if record.code == Failure.mismatch:
        if record.argument == Argument.handle and (record.expected | record.seen) >= GENERATION:
            return Mismatch("placement", _generation(record.expected), _generation(record.seen), record.peer)
        if record.argument == Argument.handle:
            mine, theirs = (f"that of the dispatch of round {tag // 2}" for tag in (record.expected, record.seen))
            return Mismatch("handle", mine, theirs, record.peer)
        if record.argument == Argument.rejected:
            return OutOfStep(record.expected, record.seen, record.peer)
        if record.op != record.seen and record.expected == record.op:
            return Mismatch("operation", _OPS[record.expected], _OPS[record.seen], record.peer)
        return Mismatch(*signature.difference(record.expected, record.seen, _OPS[record.op]), record.peer)
    if record.code == Failure.excluded:
        return Excluded(record.rank, ())
    known = known_of(record, _OPS[record.op])
    where = f"{_OPS[record.op]}, round {record.round}, phase {Phase(record.phase).name}"
    if record.op == 0:  # an interrupt of this rank while it was in no round
        where = "between rounds"
    why = f": {dead[record.peer]}" if record.peer in dead else ""
    if record.code == Failure.peer_lost or (why and record.peer != record.rank):
        if last:
            why = f": {dead.get(record.peer, 'it has left')}, after {last}"
        return PeerLost(f"rank {record.peer} is gone (noticed by rank {record.rank} in {where}){why}", **known)
    if record.code == Failure.timeout:
        if record.peer == record.rank and known["phase"] != "grid":  # the peer that gave up has aborted this rank
            return Timeout(f"another rank timed out waiting for rank {record.rank} (noticed in {where})", **known)
        waited = (
            f"after {record.waited_ns / 1e9:.1f} s" if record.waited_ns else "when another rank reported the timeout"
        )
        what = _PHASES[Phase(record.phase)]
        return Timeout(
            f"rank {record.rank} waited for rank {record.peer}: {what} ({where}); gave up {waited}",
            **known,
        )
    by = stopper(record.rank, record.peer)
    return Aborted(f"rank {record.rank} was stopped by {by} ({where}){why}", **known)


def _generation(word: int) -> str:
    """Show what ranks compare of their placements: generation_of of csrc/protocol/placement.h."""
    return f"generation {word % (1 << 32)} with digest {word % GENERATION >> 32:#x}"


def known_of(record: _native.FailureRecordView, op: str) -> dict[str, Any]:
    """Return the attributes of the errors of a failed wait."""
    phase = Phase(record.phase).name
    return {"rank": record.rank, "peer": record.peer, "op": op, "round": record.round, "phase": phase}


def stopper(rank: int, culprit: int) -> str:
    """Return who has stopped a rank, in words."""
    return "abort() or an interrupt" if culprit == rank else f"rank {culprit}"


def _bad_input(record: _native.FailureRecordView) -> BadInput:
    batched = record.argument == Argument.batched
    argument = "topk_idx" if batched else Argument(record.argument).name
    if record.argument == Argument.topk_idx:
        return BadInput(argument, f"expert {record.seen}", f"-1 to {record.expected - 1}", record.peer)
    if record.argument == Argument.handle:
        got = "a handle whose tables were overwritten, or of a dispatch before a mask"
        return BadInput("handle", got, "an unmodified handle", record.peer)
    if record.argument == Argument.max_rows:
        return TooManyRows(record.seen, record.expected, record.round, record.peer)
    if batched:
        return BadInput(
            argument,
            f"{record.seen} rows for one expert",
            f"at most ranks * max_tokens = {record.expected}",
            record.peer,
        )
    return BadInput(argument, "NaN", "numbers", record.peer)
