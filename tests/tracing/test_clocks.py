"""Alignment of clocks: offsets that a test has made come back, to within the error that is stated."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from moecomm.observe.tracing.merge import merge, offsets
from moecomm.observe.tracing.reading import RankSpans, Span

FILE = RankSpans(Path("rank0.spans"), "b", None, 0, 3, "a", "clock a", 1, "host", (0, 0))


def job(seed: int, rounds: int) -> tuple[list[RankSpans], dict[str, int]]:
    """Three ranks of hosts whose clocks differ, with barriers as they would pass them."""
    choose = random.Random(seed)
    real = {f"clock {host}": choose.randrange(-(10**12), 10**12) for host in "abc"}
    files = []
    now = 10**13
    passages = []
    for _ in range(rounds + 1):
        came = [now + choose.randrange(1000, 50_000) for _ in real]
        passages.append([(at, max(came) + choose.randrange(100, 20_000)) for at in came])
        now = max(left for _, left in passages[-1])
    for rank, (clock, offset) in enumerate(real.items()):
        barrier, *times = [(came + offset, left + offset) for came, left in (passage[rank] for passage in passages)]
        spans = [
            Span(f"dispatch round {number}", "calls", begin, end, {"round": number})
            for number, (begin, end) in enumerate(times, 1)
        ]
        file = replace(FILE, path=Path(f"rank{rank}.spans"), rank=rank, host=clock[-1], clock=clock)
        files.append(replace(file, barrier=barrier, spans=spans))
    return files, {clock: offset - real["clock a"] for clock, offset in real.items()}


def test_offsets_are_found_within_the_error_that_is_stated() -> None:
    for seed in range(200):
        files, real = job(seed, seed % 20)
        found = offsets(files, "clock a")
        assert found.keys() == real.keys()
        for clock, (offset_ns, error_ns) in found.items():
            assert abs(offset_ns - real[clock]) <= error_ns, (seed, clock)
            assert error_ns <= 70_000


def test_more_rounds_narrow_the_error() -> None:
    few, many = (offsets(job(3, rounds)[0], "clock a")["clock b"].error_ns for rounds in (0, 50))
    assert many < few / 2


def test_a_merged_trace_is_in_the_time_of_the_first_rank_and_says_how_exactly() -> None:
    files, _ = job(5, 10)
    trace = merge(files)
    clocks = {clock["host"]: clock for clock in trace["otherData"]["clocks"]}
    assert clocks["a"]["error_ns"] == 0 and all(clock["aligned"] for clock in clocks.values())
    worst_us = max(clock["error_ns"] for clock in clocks.values()) / 1000
    for number in range(1, 11):
        spans = [event for event in trace["traceEvents"] if event["name"] == f"dispatch round {number}"]
        assert len(spans) == 3
        last_begin = max(event["ts"] for event in spans)
        assert all(last_begin <= event["ts"] + event["dur"] + 2 * worst_us for event in spans)


def test_a_clock_without_a_common_barrier_is_named() -> None:
    files, _ = job(1, 3)
    lone = replace(files[2], buffer="another")
    trace = merge([*files[:2], lone])
    assert {clock["host"]: clock["aligned"] for clock in trace["otherData"]["clocks"]} == {
        "a": True,
        "b": True,
        "c": False,
    }


def test_a_failed_dispatch_is_no_barrier() -> None:
    files, real = job(1, 3)
    spans = [span._replace(begin_ns=span.begin_ns + 10**9, end_ns=span.end_ns + 10**9) for span in files[1].spans]
    failed = [span._replace(args={**span.args, "error": "Timeout"}) for span in spans]
    found = offsets([files[0], replace(files[1], spans=failed), files[2]], "clock a")
    assert abs(found["clock b"].offset_ns - real["clock b"]) <= found["clock b"].error_ns
