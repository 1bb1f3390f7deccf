"""Where the plugin says that time went: numbers are those of what was posted, times fit into each other, off is off."""

from __future__ import annotations

import time

import pytest

from moecomm import rma_plugin

from .conftest import Drive

WAYS = ("loopback", "tcp")


def times(drive: Drive, way: str, memory: str, on: str) -> tuple[list[dict[str, int]], float]:
    """Of each rank, and the seconds that all of it took."""
    begin = time.monotonic()
    said = drive("random", way=way, memory=memory, ops=40, slice=100_000, times=on)
    names = ("posted", "posted_signals", "posted_bytes", "on", "since_ns", *rma_plugin.SUMS)
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("times ")]
    return [dict(zip(names, map(int, line), strict=True)) for line in lines], time.monotonic() - begin


@pytest.mark.parametrize(("way", "memory"), [("loopback", "cuda"), ("tcp", "cuda"), ("tcp", "host")])
def test_numbers_are_exact_and_times_fit_into_each_other(drive: Drive, way: str, memory: str) -> None:
    ranks, seconds = times(drive, way, memory, "1")
    assert len(ranks) == 2
    for found in ranks:
        assert found["posted"] > 100 and found["on"] == 1
        assert found["operations"] == found["ended"] == found["posted"]
        assert (found["signals"], found["bytes"]) == (found["posted_signals"], found["posted_bytes"])
        assert 0 < found["posting_ns"] <= found["busy_ns"] <= found["until_ended_ns"]
        assert found["busy_ns"] <= found["since_ns"] <= seconds * 1e9
        # One thread posts and polls.
        assert found["posting_ns"] + found["polling_ns"] <= found["since_ns"]
        assert 0 < found["writing_ns"] <= found["polling_ns"]
        assert 0 < found["empty_polls"] < found["polls"]
        assert found["clock_reads"] >= 2 * found["operations"] + 2 * found["polls"]
        assert (0 < found["driver_ns"] < found["posting_ns"]) == (memory == "cuda")
    assert sum(found["words"] for found in ranks) == sum(found["signals"] for found in ranks)


@pytest.mark.parametrize("way", WAYS)
def test_off_nothing_is_added_up_and_no_clock_is_read(drive: Drive, way: str) -> None:
    for found in times(drive, way, "cuda", "0")[0]:
        assert found["posted"] > 100
        assert {name: found[name] for name in ("on", "since_ns", *rma_plugin.SUMS) if found[name]} == {}


def test_this_process_has_none() -> None:
    """Nobody has made a communicator here."""
    assert rma_plugin.take_times() is None
