"""The flight record of one rank: a dictionary of numbers, strings and lists, in the format of torch's flight recorder.

torch's (`torch._C._distributed_c10d._dump_fr_trace_json`, version 2.10) has the names of the first level and of an
entry, except for those that only Buffers have: see docs/observing.md.  torch writes pickles, moecomm writes JSON.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

import torch

from moecomm.observe.stats.publish import own_stats
from moecomm.rounds import signature
from moecomm.rounds.flight import Entry, Failure, Rejected
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.tally import Kind

FORMAT = 1
_TORCH_VERSION = "2.10"  # of the format of torch's flight recorder
_DTYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float8_e4m3fn: "Float8_e4m3fn",
}
_OF_ROUND = {"dispatch": ("dispatch", "dispatch_begin", "dispatch_end"), "combine": ("combine", "reduce")}


def flight_record(rounds: Rounds) -> dict[str, Any]:
    """Return the flight record of a Buffer on this rank.  Waits for nothing; closed Buffers have one, too."""
    flight, context = rounds.flight, rounds.session.context
    begun = None
    if not (flight.closed or flight.replays):
        with contextlib.suppress(RuntimeError):  # of a broken CUDA context
            begun = rounds.session.round_begun()
    name = f"moecomm.Buffer {rounds.origin.identity}"
    unraised = rounds.unraised()
    failures = [*flight.failures, *([] if unraised is None else [unraised])]
    failed = _failed_records(flight.entries(), failures)
    entries = [
        _entry(entry, rounds, name, _state(entry, rounds.on_cpu, begun, failed), int(context.timeout_ns / 1e6))
        for entry in flight.entries()
    ]
    status = {
        "last_enqueued_collective": flight.steps,
        "last_started_collective": _last(entries, "started", "failed", "completed"),
        "last_completed_collective": _last(entries, "completed"),
    }
    stats = None if flight.closed else own_stats(rounds)
    ranks = list(rounds.flight.global_ranks) or list(range(rounds.num_ranks))
    return {
        "version": _TORCH_VERSION,
        "comm_lib_version": f"moecomm {_version()}",
        "pg_config": {"0": {"name": "0", "desc": name, "ranks": str(ranks)}},
        "pg_status": {"0": status},
        "entries": entries,
        "moecomm": {
            "format": FORMAT,
            "buffer": rounds.origin.identity,
            "before": None if flight.before is None else {"buffer": flight.before[0], "rank": flight.before[1]},
            "rank": rounds.rank,
            "ranks": rounds.num_ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "backend": rounds.session.name,
            "opened_ns": flight.opened_ns,
            "written_ns": time.time_ns(),
            "reasons": list(flight.reasons),
            "raised": flight.raised,
            "closed": flight.closed,
            "replays": flight.replays,
            "round_begun": begun,
            "rejected": flight.rejected,
            "gone": [] if flight.closed else sorted(rounds.session.dead_peers().keys() - {rounds.rank}),
            "masked": sorted(rounds.masked),
            "stats": None if stats is None else stats.lists(),
            "failures": [_failure(failure) for failure in failures],
        },
    }


def _version() -> str:
    from moecomm import __version__

    return __version__


def _last(entries: list[dict[str, Any]], *states: str) -> int:
    return max((entry["collective_seq_id"] for entry in entries if entry["state"] in states), default=0)


def _failed_records(entries: list[Entry], failures: list[Failure]) -> set[int]:
    """Return the numbers of the entries that failure records are about."""
    found = set()
    for failure in failures:
        number, ops = failure.record.get("round", 0), _OF_ROUND.get(str(failure.record.get("op")), ())
        named = [e.record for e in entries if isinstance(e.what, Kind) and 0 < e.round == number and e.what.op in ops]
        found.update(named[-1:])  # of a split dispatch, the half that was made last
    return found


def _state(entry: Entry, on_host: bool, begun: int | None, failed: set[int]) -> str:
    if isinstance(entry.what, Rejected):
        return "rejected"
    if entry.record in failed:
        return "failed"
    if entry.ended_ns:
        return "completed"
    if on_host:
        return "started"
    if entry.captured:
        return "captured"
    if begun is None or entry.round == 0 or entry.round > begun:
        return "scheduled"
    return "started" if entry.round == begun else "completed"


def _entry(entry: Entry, rounds: Rounds, name: str, state: str, timeout_ms: int) -> dict[str, Any]:
    what = entry.what
    rejected = isinstance(what, Rejected)
    sizes = [[entry.tokens, rounds.hidden]]
    dtypes = [] if isinstance(what, Rejected) else [_DTYPES.get(what.dtype, str(what.dtype))]
    sends = not rejected and what.op.startswith("dispatch")
    returns = not rejected and not sends
    return {
        "record_id": entry.record,
        "pg_id": 0,
        "process_group": ["0", name],
        "collective_seq_id": entry.step,
        "p2p_seq_id": 0,
        "op_id": entry.record,
        "profiling_name": f"moecomm:{what.op}",
        "time_created_ns": entry.created_ns,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": entry.ended_ns or None,
        "input_sizes": sizes if sends else [],
        "input_dtypes": dtypes if sends else [],
        "output_sizes": sizes if returns else [],
        "output_dtypes": dtypes if returns else [],
        "state": state,
        "retired": state in ("completed", "failed", "rejected"),
        "timeout_ms": timeout_ms,
        "is_p2p": False,
        "round": entry.round or None,
        "tokens": entry.tokens,
        "captured": entry.captured,
        "rejected": entry.rejected,
        "call": {} if isinstance(what, Rejected) or what.op == "reduce" else signature.shown(what.call, what.op),
        "error": what.error if isinstance(what, Rejected) else None,
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "error": failure.error,
        "text": failure.text,
        "step": failure.step,
        "time_ns": failure.time_ns,
        "record": dict(failure.record),
    }
