"""The switch of traces: who is traced, for how long, and where files go."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest

import moecomm
from moecomm import _native
from moecomm.observe import tracing
from moecomm.observe.tracing import reading

from . import traces


def test_without_a_trace_nothing_is_written_and_no_step_is_timed(tmp_path: Path) -> None:
    with moecomm.Buffer("self", **traces.SIZES) as buffer:
        traces.make_rounds(buffer)
        assert buffer.rounds.flight.spans is None
        assert _native.take_steps(buffer.rounds.session.context.record) == ([], 0)
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_are_open_are_traced_for_as_long_as_the_block_lasts(tmp_path: Path) -> None:
    with moecomm.Buffer("self", **traces.SIZES) as buffer:
        traces.make_rounds(buffer, 1)
        for _ in range(2):
            with moecomm.trace(tmp_path):
                traces.make_rounds(buffer, 1)
            traces.make_rounds(buffer, 1)
        assert _native.take_steps(buffer.rounds.session.context.record) == ([], 0)
    first, second = sorted(
        [[span.args["round"] for span in file.spans if " round " in span.name] for file in reading.read([tmp_path])]
    )
    assert (first, second) == ([3, 4], [7, 8])
    trace = traces.merged(tmp_path)
    assert len(traces.processes(trace)) == 1


def test_files_are_private(tmp_path: Path) -> None:
    with moecomm.trace(tmp_path / "new"), moecomm.Buffer("self", **traces.SIZES):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()] == [0o600]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(moecomm.BadInput, match="folder"), moecomm.trace(folder):
        pytest.fail("it began")
    monkeypatch.setenv("MOECOMM_TRACE_DIR", str(folder))
    with pytest.raises(moecomm.BadInput, match="MOECOMM_TRACE_DIR"):
        moecomm.Buffer("self", **traces.SIZES)


def test_a_second_folder_is_refused_while_a_trace_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moecomm.trace(tmp_path / "one"), moecomm.trace(tmp_path / "one"):
        with pytest.raises(moecomm.BadInput, match="where a trace has begun"), moecomm.trace(tmp_path / "two"):
            pytest.fail("it began")
        with moecomm.Buffer("self", **traces.SIZES) as buffer:
            traces.make_rounds(buffer, 1)
    monkeypatch.setenv("MOECOMM_TRACE_DIR", str(tmp_path / "one"))
    with pytest.raises(moecomm.BadInput, match="where a trace has begun"), moecomm.trace(tmp_path / "two"):
        pytest.fail("it began")
    assert len(reading.read([tmp_path / "one"])) == 1


def test_descriptors_of_files_are_closed(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with moecomm.trace(tmp_path), moecomm.Buffer("self", **traces.SIZES) as buffer:
            traces.make_rounds(buffer, 1)
        del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_buffer_that_is_dropped_leaves_no_steps_behind(tmp_path: Path) -> None:
    with moecomm.trace(tmp_path):
        buffer = moecomm.Buffer("self", **traces.SIZES)
        record = buffer.rounds.session.context.record
        traces.make_rounds(buffer, 1)
        del buffer
        gc.collect()
        assert _native.take_steps(record) == ([], 0)


def test_a_profiler_gets_ranges_with_operation_and_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = traces.Ranges()
    monkeypatch.setattr(tracing, "nvtx_ranges", lambda: ranges)
    with moecomm.trace(tmp_path), moecomm.Buffer("self", **traces.SIZES) as buffer:
        traces.make_rounds(buffer, 1)
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(None, None)
    assert ranges.seen == [
        *("moecomm:dispatch", "moecomm:dispatch round 1", "moecomm:combine", "moecomm:combine round 2"),
        "moecomm:dispatch",
    ]
    assert ranges.open == []
