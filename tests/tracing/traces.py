"""Traces of small jobs on CPU ranks, and what a Chrome trace must have."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import moecomm
from moecomm.observe.tracing import reading
from moecomm.observe.tracing.merge import merge

from ..backends.conftest import all_ranks

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 12, "topk": 2, "max_tokens": 64, "backend": "host"}
ROUNDS = 3  # pairs of a dispatch and a combine
CALLS = [op for _ in range(ROUNDS) for op in ("dispatch", "combine")]


def make_rounds(buffer: moecomm.Buffer, rounds: int = ROUNDS) -> None:
    tokens = 8 + buffer.rank
    ids = torch.stack([torch.arange(tokens) % 12, (torch.arange(tokens) + 5) % 12], dim=1)
    for _ in range(rounds):
        routed = buffer.dispatch(torch.ones(tokens, 64, dtype=torch.bfloat16), ids, num_sms=2)
        buffer.combine(routed.x, routed.handle, num_sms=2)


def run_rank(rank: int, group: Any) -> None:
    with moecomm.Buffer(group, **SIZES, timeout_s=20) as buffer:
        make_rounds(buffer)


def run_traced(rank: int, group: Any, folder: str) -> None:
    with moecomm.trace(folder):
        run_rank(rank, group)


def lose_one(rank: int, group: Any, folder: str) -> tuple[str, int]:
    """Rank 0 is killed between its rounds, and the others go on without it."""
    os.environ["MOECOMM_TRACE_DIR"] = folder
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20)
    make_rounds(buffer)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(moecomm.PeerLost):
        make_rounds(buffer)
    buffer.shrink()
    make_rounds(buffer)
    buffer.close()
    return buffer.rounds.origin.identity, buffer.rank


def threads(ranks: int, *arguments: Any, run: Any = run_rank) -> None:
    """Run ranks as threads."""
    all_ranks(ranks, lambda group: run(group.rank, group, *arguments))


def merged(folder: Path) -> dict[str, Any]:
    found = merge(reading.read([folder]))
    check(found)
    return found


def check(trace: dict[str, Any]) -> None:
    """Every event has what the format asks for, and spans of a track nest."""
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert named["thread_name"] == set(tracks)
    assert named["process_name"] == {(pid, 0) for pid, _ in tracks}
    for track, spans in tracks.items():
        assert nest(spans), track


def nest(spans: list[tuple[float, float]]) -> bool:
    """Return whether of any two spans one contains the other, or they do not overlap.  To within a rounding, in us."""
    outer: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while outer and outer[-1] <= begin + 1e-3:
            outer.pop()
        if outer and end > outer[-1] + 1e-3:
            return False
        outer.append(end)
    return True


def spans_of(trace: dict[str, Any], pid: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]


def rounds_of(trace: dict[str, Any], pid: int) -> list[str]:
    return [event["name"] for event in spans_of(trace, pid) if " round " in event["name"]]


def processes(trace: dict[str, Any]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}


class Ranges:
    """Ranges of a profiler: those that are open, and all that were opened."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(name)

    def pop(self) -> None:
        self.open.pop()
