"""The ring: what it keeps, and what a call costs."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import pytest
import torch

import moecomm
from moecomm.rounds.flight import CALLS, FlightRecorder, Rejected
from moecomm.rounds.tally import Kind
from moecomm.testing.ranks import LocalBuffers

from .records import FakeRank

X, IDS = torch.ones(4, 64, dtype=torch.bfloat16), torch.arange(4).remainder(2).unsqueeze(1)


def opened() -> moecomm.Buffer:
    return moecomm.Buffer("self", hidden=64, num_experts=2, topk=1, max_tokens=4, backend="host")


def calls_of(buffer: moecomm.Buffer) -> list[tuple[Any, ...]]:
    entries = buffer.flight_record()["entries"]
    return [(e["profiling_name"], e["collective_seq_id"], e["round"], e["state"]) for e in entries]


def test_the_last_calls_are_kept_and_the_oldest_come_first() -> None:
    choose, rank, made = random.Random(1), FakeRank(0, 1), []
    for number in range(3 * CALLS):
        if choose.random() < 0.1:
            rank.reject()
            made.append(None)
        else:
            rank.make([("dispatch", 0)])
            made.append(number)
        entries = rank.flight.entries()
        assert [e.record for e in entries] == list(range(max(0, len(made) - CALLS), len(made)))
        assert [isinstance(e.what, Rejected) for e in entries] == [m is None for m in made[-CALLS:]]
    assert rank.flight.steps == len([m for m in made if m is not None])
    assert rank.flight.rejected == made.count(None)


def test_every_call_of_a_buffer_is_recorded() -> None:
    with opened() as buffer:
        routed = buffer.dispatch(X, IDS)
        buffer.combine(routed.x, routed.handle)
        begun = buffer.dispatch_begin(X, IDS, layout="flat")
        buffer.combine(routed.x, routed.handle)
        buffer.dispatch_end(begun)
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(X.double(), IDS)
        w13, w2 = torch.zeros(2, 16, 64).bfloat16(), torch.zeros(2, 64, 8).bfloat16()
        buffer.moe(X, IDS, None, w13, w2)
        assert calls_of(buffer) == [
            ("moecomm:dispatch", 1, 1, "completed"),
            ("moecomm:combine", 2, 2, "completed"),
            ("moecomm:dispatch_begin", 3, 3, "completed"),
            ("moecomm:combine", 4, 4, "completed"),
            ("moecomm:dispatch_end", 5, 3, "completed"),
            ("moecomm:dispatch", 5, None, "rejected"),
            ("moecomm:dispatch", 6, 5, "completed"),
            ("moecomm:combine", 7, 6, "completed"),
        ]
        # Rounds have the numbers that the protocol gives them.
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(X, torch.full_like(IDS, 9))
        record = buffer.flight_record()
        assert record["entries"][-1]["state"] == "failed"
        assert record["moecomm"]["failures"][-1]["record"]["round"] == record["entries"][-1]["round"] == 7


def test_ranks_that_one_thread_drives_are_recorded_as_well() -> None:
    with LocalBuffers(2, hidden=64, num_experts=2, topk=1, max_tokens=4, backend="host") as ranks:
        routed = ranks.dispatch([{"x": X, "topk_idx": IDS}] * 2)
        ranks.combine([{"y": r.x, "handle": r.handle} for r in routed])
        for buffer in ranks.buffers:
            assert [call[0] for call in calls_of(buffer)] == ["moecomm:dispatch", "moecomm:combine"]


def test_a_closed_buffer_still_has_its_record() -> None:
    buffer = opened()
    buffer.dispatch(X, IDS)
    buffer.close()
    assert calls_of(buffer) == [("moecomm:dispatch", 1, 1, "completed")]
    assert buffer.flight_record()["moecomm"]["closed"]


def test_on_gpus_a_call_is_over_when_the_host_has_waited_for_it() -> None:
    rank = FakeRank(0, 2, on_host=False)
    rank.make([("dispatch", 0), ("combine", 0)])
    assert [e["state"] for e in rank.record()["entries"]] == ["scheduled"] * 2
    rank.flight.settle()
    rank.make([("dispatch", 0), ("combine", 0), ("dispatch", 0)])
    assert [e["state"] for e in rank.record()["entries"]] == ["completed"] * 2 + ["scheduled"] * 3
    rank.begun = 4  # the number of a round in the device's memory
    states = ["completed"] * 3 + ["started", "scheduled"]
    assert [e["state"] for e in rank.record()["entries"]] == states
    status = rank.record()["pg_status"]["0"]
    assert status == {
        "last_enqueued_collective": 5,
        "last_started_collective": 4,
        "last_completed_collective": 3,
    }


def test_replays_of_a_graph_make_the_numbers_of_rounds_unknown() -> None:
    rank = FakeRank(0, 2, on_host=False, begun=100)
    rank.make([("dispatch", 0)])
    rank.captures = True
    rank.make([("dispatch", 0), ("combine", 0)])
    rank.captures = False
    rank.make([("dispatch", 0)])
    rank.flight.settle()
    record = rank.record()
    assert [e["round"] for e in record["entries"]] == [1, None, None, None]
    assert [e["state"] for e in record["entries"]] == ["completed", "captured", "captured", "completed"]
    assert record["moecomm"]["replays"] and record["moecomm"]["round_begun"] is None


def test_a_call_costs_about_a_microsecond() -> None:
    flight = FlightRecorder(0, lambda: False, True)
    kind: Kind = flight.kind("dispatch", 1, torch.bfloat16, 128)
    best = 1.0
    for _ in range(50):
        begin = time.perf_counter()
        for _ in range(200):
            flight.end(flight.begin(kind, 5))
        best = min(best, (time.perf_counter() - begin) / 200)
    assert best < 3e-6, f"{best * 1e9:.0f} ns"


def test_the_ring_does_not_grow() -> None:
    flight = FlightRecorder(0, lambda: False, True)
    kind = flight.kind("dispatch", 1, torch.bfloat16, 128)

    def calls() -> None:
        for _ in range(4 * CALLS):
            flight.end(flight.begin(kind, 5))
            flight.reject("dispatch", None)
            flight.failed(moecomm.BadInput("x", 1, 2))

    calls()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        calls()
        first, _ = tracemalloc.get_traced_memory()
        calls()
        second, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert second - first < (first - before) / 100 + 4096, (before, first, second)


def test_the_ring_begins_anew_after_shrink() -> None:
    with opened() as buffer:
        buffer.dispatch(X, IDS)
        before = buffer.flight_record()["moecomm"]
        buffer.shrink()
        after = buffer.flight_record()
        assert after["entries"] == [] and after["moecomm"]["buffer"] != before["buffer"]
        assert after["moecomm"]["before"] == {"buffer": before["buffer"], "rank": 0}
        buffer.dispatch(X, IDS)
        assert calls_of(buffer) == [("moecomm:dispatch", 1, 1, "completed")]
