"""Traces of CPU ranks: each round of each rank is in the merged file, at the time at which it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import moecomm
from moecomm.observe.tracing import reading
from moecomm.tools.cli import app

from ..conftest import Ranks
from . import traces

ALL = [f"{op} round {number}" for number, op in enumerate(traces.CALLS, 1)]


@pytest.mark.parametrize("kind", ["threads", "processes", "variable"])
def test_every_round_of_every_rank_is_there(
    kind: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trace"
    if kind == "processes":
        ranks.start(3, traces.run_traced, str(folder))
        ranks.results(3)
    elif kind == "threads":
        traces.threads(3, str(folder), run=traces.run_traced)
    else:
        monkeypatch.setenv("MOECOMM_TRACE_DIR", str(folder))
        traces.threads(3)
    trace = traces.merged(folder)
    assert [name.split(" (")[0] for name in traces.processes(trace).values()] == ["rank 0", "rank 1", "rank 2"]
    for pid in (1, 2, 3):
        assert traces.rounds_of(trace, pid) == ALL
    assert trace["otherData"]["dropped"] == {}
    assert [clock["error_ns"] for clock in trace["otherData"]["clocks"]] == [0]


def test_a_round_of_two_ranks_is_at_the_same_time(ranks: Ranks, tmp_path: Path) -> None:
    """A dispatch ends after all ranks have begun it, as a barrier does."""
    ranks.start(2, traces.run_traced, str(tmp_path / "trace"))
    ranks.results(2)
    trace = traces.merged(tmp_path / "trace")
    for number in range(1, 2 * traces.ROUNDS, 2):
        first, second = (
            next(event for event in traces.spans_of(trace, pid) if event["name"] == f"dispatch round {number}")
            for pid in (1, 2)
        )
        assert first["ts"] < second["ts"] + second["dur"] and second["ts"] < first["ts"] + first["dur"]


def test_spans_say_what_was_called(tmp_path: Path) -> None:
    with moecomm.trace(tmp_path / "trace"), moecomm.Buffer("self", **traces.SIZES) as buffer:
        x, ids = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 5], [1, 2], [3, 4], [11, 3]])
        w13, w2 = torch.zeros(12, 32, 64, dtype=torch.bfloat16), torch.zeros(12, 64, 16, dtype=torch.bfloat16)
        buffer.moe(x, ids, None, w13, w2)
        buffer.dispatch_end(buffer.dispatch_begin(x[:3], ids[:3], layout="flat"))
        buffer.check()
    found = {event["name"]: event["args"] for event in traces.spans_of(traces.merged(tmp_path / "trace"), 1)}
    assert found["moe"] == {"round": 1, "tokens": 4, "layout": "expert"}
    assert {"dispatch round 1", "experts", "combine round 2", "check"} <= found.keys()
    begun, ended = found["dispatch_begin round 3"], found["dispatch_end round 3"]
    assert begun["layout"] == ended["layout"] == "flat" and begun["tokens"] == 3 and begun["dtype"] == "bfloat16"


def test_a_call_that_fails_says_with_which_error(tmp_path: Path) -> None:
    with moecomm.trace(tmp_path / "trace"), moecomm.Buffer("self", **traces.SIZES) as buffer:
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(torch.ones(2, 64), torch.zeros(2, 2, dtype=torch.int64))
        traces.make_rounds(buffer, 1)
    spans = traces.spans_of(traces.merged(tmp_path / "trace"), 1)
    assert [event["args"].get("error") for event in spans if event["name"] == "dispatch"] == ["BadInput", None]


def test_rounds_consist_of_steps_and_waits_of_threads(tmp_path: Path) -> None:
    traces.threads(2, str(tmp_path / "trace"), run=traces.run_traced)
    trace = traces.merged(tmp_path / "trace")
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"].split(",")[0]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert sorted(set(tracks.values())) == ["calls", "thread 0", "thread 1"]
    for pid in (1, 2):
        spans = traces.spans_of(trace, pid)
        rounds = {event["args"]["round"]: event for event in spans if " round " in event["name"]}
        steps = [event for event in spans if tracks[pid, event["tid"]] != "calls"]
        names = {
            op: {event["name"] for event in steps if traces.CALLS[event["args"]["round"] - 1] == op}
            for op in ("dispatch", "combine")
        }
        assert {"count", "agree", "place", "send", "receive"} <= names["dispatch"]
        assert {"announce", "reduce", "pull"} <= names["combine"]
        for event in steps:
            around = rounds[event["args"]["round"]]
            end = event["ts"] + event["dur"]
            assert around["ts"] - 1e-3 <= event["ts"] and end <= around["ts"] + around["dur"] + 1e-3
            assert not event["name"].startswith("wait") or event["args"]["peer"] in (0, 1)


def test_a_killed_rank_leaves_what_it_did(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    ranks.start(3, traces.lose_one, str(folder))
    assert {found[1] for found in ranks.results(2).values()} == {0, 1}
    trace = traces.merged(folder)
    names = [name.split(" (")[0] for name in traces.processes(trace).values()]
    assert names == ["rank 0", "rank 1 -> 0", "rank 2 -> 1"]
    assert traces.rounds_of(trace, 1)[: len(ALL)] == ALL
    for pid in (2, 3):
        assert "shrink" in [event["name"] for event in traces.spans_of(trace, pid)]
        assert traces.rounds_of(trace, pid)[-len(ALL) :] == ALL
        assert {event["args"].get("error") for event in traces.spans_of(trace, pid)} == {None, "PeerLost"}


def test_the_command_writes_the_merged_file(tmp_path: Path) -> None:
    folder, out = tmp_path / "trace", tmp_path / "out" / "trace.json"
    with moecomm.trace(folder), moecomm.Buffer("self", **traces.SIZES) as buffer:
        traces.make_rounds(buffer)
    told = CliRunner().invoke(app, ["trace", "merge", str(folder), "-o", str(out)])
    assert told.exit_code == 0, told.output
    trace = json.loads(out.read_text())
    traces.check(trace)
    assert traces.rounds_of(trace, 1) == ALL


def test_a_file_that_ends_in_a_line_is_read_so_far(tmp_path: Path) -> None:
    with moecomm.trace(tmp_path), moecomm.Buffer("self", **traces.SIZES) as buffer:
        traces.make_rounds(buffer)
    (path,) = tmp_path.glob("*.spans")
    text = path.read_bytes()
    whole = reading.read([tmp_path])[0].spans
    path.write_bytes(text[:-7])
    assert reading.read([tmp_path])[0].spans == whole[:-1]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '["a", "calls", 2, 1, {}]',
        '["a", "calls", -1, 1, {}]',
        '["a", "calls", 1, 99999999999999999999, {}]',
        '["a", 1, 1, 2, {}]',
        '["a", "calls", 1, 2, []]',
        "{}",
        "3",
    ],
)
def test_a_line_that_is_no_span_is_bad_input(line: str, tmp_path: Path) -> None:
    with moecomm.trace(tmp_path), moecomm.Buffer("self", **traces.SIZES):
        pass
    (path,) = tmp_path.glob("*.spans")
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(moecomm.BadInput, match=r"spans, line \d"):
        reading.read([tmp_path])


def test_traces_are_merged_from_files_and_folders_by_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        with moecomm.trace(tmp_path / folder), moecomm.Buffer("self", **traces.SIZES) as buffer:
            traces.make_rounds(buffer, 1)
    [one] = (tmp_path / "a").glob("*.spans")
    out = tmp_path / "trace.json"
    said = CliRunner().invoke(app, ["trace", "merge", str(one), str(tmp_path / "b"), "-o", str(out)])
    assert said.exit_code == 0 and "of 2 files" in said.output, said.output
    assert len({event["pid"] for event in json.loads(out.read_text())["traceEvents"]}) == 1, "a process"
    with pytest.raises(moecomm.BadInput, match="FILE"):
        reading.read([tmp_path / "absent.spans"])
