"""Where the plugin says that time went: numbers are those of what was posted, times fit into each other, off is off."""

from __future__ import annotations

import ctypes
import time

import pytest

from moecomm import rma_plugin

from .conftest import Drive

TABLE = "ncclRmaPlugin_v14"  # a name and 20 functions: init is the first, finalize the last


def times(drive: Drive, on: str) -> tuple[list[dict[str, int]], float]:
    """Return the times of each rank, and the seconds that all of it took."""
    begin = time.monotonic()
    said = drive("random", ops=40, slice=100_000, times=on)
    outside = ("posted", "posted_signals", "posted_bytes", "issuing_ns", "calls_that_poll", "calling_ns")
    names = (*outside, "on", "since_ns", *rma_plugin.SUMS)
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("times ")]
    return [dict(zip(names, map(int, line), strict=True)) for line in lines], time.monotonic() - begin


def test_numbers_are_exact_and_times_fit_into_each_other(drive: Drive) -> None:
    ranks, seconds = times(drive, "1")
    assert len(ranks) == 2
    for found in ranks:
        assert found["posted"] > 100 and found["on"] == 1
        assert found["operations"] == found["ended"] == found["posted"]
        assert (found["signals"], found["bytes"]) == (found["posted_signals"], found["posted_bytes"])
        assert 0 < found["posting_ns"] <= found["busy_ns"] <= found["until_ended_ns"]
        assert found["busy_ns"] <= found["since_ns"] <= seconds * 1e9
        # One thread posts and polls, and has looked at the clock around its calls.
        assert found["posting_ns"] <= found["issuing_ns"] and found["polling_ns"] <= found["calling_ns"]
        assert found["issuing_ns"] + found["calling_ns"] <= found["since_ns"]
        assert found["polls"] == found["calls_that_poll"]
        assert 0 < found["writing_ns"] <= found["polling_ns"]
        assert 0 < found["empty_polls"] < found["polls"]
        assert found["clock_reads"] >= 2 * found["operations"] + 2 * found["polls"]
        assert 0 < found["driver_ns"] < found["posting_ns"]
    assert sum(found["words"] for found in ranks) == sum(found["signals"] for found in ranks)


def test_off_nothing_is_added_up_and_no_clock_is_read(drive: Drive) -> None:
    for found in times(drive, "0")[0]:
        assert found["posted"] > 100
        assert {name: found[name] for name in ("on", "since_ns", *rma_plugin.SUMS) if found[name]} == {}


def test_what_was_opened_under_the_same_name_is_the_same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL opens it; before the first communicator that asks there is nothing to be taken."""
    assert rma_plugin.take_times() is None
    monkeypatch.setenv("MOECOMM_RMA_TIMES", "1")
    functions = (ctypes.c_void_p * 21).in_dll(ctypes.CDLL(rma_plugin.environment()["NCCL_RMA_PLUGIN"]), TABLE)
    init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.c_void_p)(
        functions[1]
    )
    finalize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(functions[20])
    context = ctypes.c_void_p()
    assert init(ctypes.byref(context), 1, None) == 0 and finalize(context) == 0
    found = rma_plugin.take_times()
    assert found is not None and found["operations"] == 0 and found["since_ns"] > 0
