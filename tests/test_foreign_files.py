"""Commands that read files: whatever a file is or has in it, they end, with their table or with a named error."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command

import moecomm
from moecomm.errors import BadInput, MoecommError
from moecomm.observe.stats.publish import FORMAT
from moecomm.tools import cli
from moecomm_bench import simulate

from .flight.records import FakeRank
from .routing.test_file import SMALL
from .tracing import traces

RESULTS = Path(__file__).parents[1] / "bench" / "results"
PARAMETERS = Path(simulate.__file__).parent / "h200.json"
# One result of each table, plot and fit.
SHOWN = (
    *("cold-h200-2", "backends-h200-4", "latency-backends-h200-4", "all-to-all-h200-4"),
    *("gemm-h100", "moe-mixtral-8x7b-h200-2", "overlap-matmul-all-to-all-h100-2", "all-gather-study-h100-2"),
    *("decode-h100-2", "training-h100-2", "deep-ep-layer-h100-4", "simulate", "simulate-check"),
    *("beside-h200-4", "host_vs_gloo", "virtual-ranks-h200", "peers-alone-h200"),
)
PLOTTED = (
    *("cold-h200-2", "beside-h200-4", "backends-domains-h200-4", "latency-backends-h200-4", "all-to-all-h200-4"),
    *("gemm-h100", "moe-mixtral-8x7b-h200-2", "overlap-matmul-all-to-all-h100-2", "simulate"),
)
CHECKED = ("cold-h200-2", "beside-h200-2", "backends-domains-h200-4", "latency-backends-h200-4", "virtual-ranks-h200")
MOECOMM = get_command(cli.app)
_ROWS = 4  # of a result: a change hits each part of it often
_UNREAD = ("kernels", "versions", "conditions", "fit", "one_domain")


def kept(name: str) -> dict[str, Any]:
    """A result, shortened."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    for part in ("rows", "measured", "published"):
        if part in found:
            found[part] = [*found[part][: _ROWS // 2], *found[part][-_ROWS // 2 :]]
    return {key: value for key, value in found.items() if key not in _UNREAD}


def flight_record() -> dict[str, Any]:
    rank = FakeRank(0, 2)
    rank.make([("dispatch", 0), ("combine", 0)])
    rank.reject()
    rank.make([("dispatch", 0)])
    rank.fail(moecomm.Timeout, peer=1, waited_s=1)
    found = json.loads(json.dumps(rank.record()))
    with moecomm.Buffer("self", **traces.SIZES) as buffer:
        counters = buffer.stats().lists()
    for name, value in counters.items():
        if isinstance(value, list) and name != "rows_per_expert":
            counters[name] = [row * 2 for row in value] if name == "wait_ns" else value * 2  # of two ranks
    found["moecomm"]["stats"] = counters
    return found


def spans() -> list[Any]:
    """The lines of a file of spans."""
    header = {"format": 1, "buffer": "b", "before": {"buffer": "a", "rank": 0}, "rank": 0, "ranks": 1, "host": "h"}
    header |= {"clock": "c", "pid": 1, "backend": "host", "barrier": [1, 2], "began_ns": 1}
    lines: list[Any] = [["dispatch round 1", "calls", 3, 9, {"round": 1}], ["send", "thread 0", 4, 5, {"round": 1}]]
    lines += [["wait for rank 1: header", "thread 0", 5, 6, {"round": 1, "peer": 1}], {"dropped": 3}]
    return [header, *lines, {"clock": [1, 2, 3]}]


def counters() -> dict[str, Any]:
    """A file of `moecomm top`."""
    with moecomm.Buffer("self", **traces.SIZES) as buffer:
        sample = {"time_ns": 1, "stats": buffer.stats().lists()}
    about = {"format": FORMAT, "buffer": "b", "rank": 0, "ranks": 1, "host": "h", "pid": 1, "written_ns": 2}
    return {**about, "samples": [sample, {**sample, "time_ns": 2}]}


def routing(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a file of recorded routing, and its tensors."""
    data = SMALL.save(folder / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def as_json(found: Any) -> bytes:
    return json.dumps(found).encode()


def as_lines(found: Any) -> bytes:
    lines = found if isinstance(found, list) else [found]
    return b"".join(as_json(line) + b"\n" for line in lines)


class Command:
    """A command that reads a file of some name in a folder; in its words `{file}` and `{folder}` stand for these."""

    def __init__(self, words: str, name: str = "x.json", write: Callable[[Any], bytes] = as_json) -> None:
        self.words, self.name, self.write = words, name, write

    def run(self, folder: Path) -> BaseException | None:
        """Run it, and return the error with which it ends, if any."""
        out = folder / "out.svg"
        words = [word.format(file=folder / self.name, folder=folder, out=out) for word in self.words.split()]
        try:
            MOECOMM(words, standalone_mode=False)
        except Exception as error:  # noqa: BLE001 - what a test looks at
            return error
        return None


EXPLAIN, TOP = Command("explain {file}"), Command("top {folder} --once", "moecomm-top-b-rank0.json")
MERGE = Command("trace merge {file} -o {out}", "moecomm-b-rank0-1.spans", as_lines)
SHOW, PLOT = Command("bench show {file}"), Command("bench plot {file} --out {out}")
CHECK = Command("simulate check {file}")
PREDICT = Command("simulate --parameters {file}")
ROUTING = Command("routing show {file}")
COMMANDS = (EXPLAIN, TOP, MERGE, SHOW, PLOT, CHECK, PREDICT, ROUTING)
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)


@every_command
@pytest.mark.parametrize("kind", ["fifo", "zeros", "sparse", "folder", "empty", "nested", "absent"])
def test_what_is_no_document_is_refused_and_never_waited_for(command: Command, kind: str, tmp_path: Path) -> None:
    file = tmp_path / command.name
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "zeros":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 5 << 30)
    elif kind == "folder":
        file.mkdir()
    elif kind != "absent":
        file.write_bytes(b"" if kind == "empty" else b"[" * 100_000)
    assert isinstance(command.run(tmp_path), BadInput)


REPLACEMENTS = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 3, 1 << 39, 1 << 70, 0.5, -2.5, 1e-9, 1e300]),
    st.sampled_from(["", "x", "[/b]", "$x^{$", "\0", "host", "torch", "flat", "9" * 5000, [], {}, [1], [[]]]),
)


def change(draw: st.DataObject, document: Any) -> Any:
    """A document with one entry that is gone, or replaced."""
    document = copy.deepcopy(document)
    node = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return document
        key = draw.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and draw.draw(st.integers(0, 5)):
            node = node[key]
            continue
        if draw.draw(st.booleans()):
            del node[key]
        else:
            node[key] = draw.draw(REPLACEMENTS)
        return document


def endures(command: Command, documents: list[Any], folder: Path, examples: int, after: bytes = b"") -> None:
    """Run a command on documents as they are, and on changed ones."""
    for document in documents:
        (folder / command.name).write_bytes(command.write(document) + after)
        assert command.run(folder) is None

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        document = change(data, data.draw(st.sampled_from(documents)))
        for _ in range(data.draw(st.integers(0, 1))):
            document = change(data, document) if isinstance(document, (dict, list)) else document
        (folder / command.name).write_bytes(command.write(document) + after)
        error = command.run(folder)
        if not (error is None or isinstance(error, MoecommError)):
            raise error

    run()


@every_command
@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.long)])
def test_no_document_ends_a_command_in_a_foreign_error(command: Command, times: int, tmp_path: Path) -> None:
    after = b""
    documents: list[Any]
    if command is EXPLAIN:
        documents = [flight_record()]
    elif command is TOP:
        documents = [counters()]
    elif command is MERGE:
        documents = [spans()]
    elif command in (SHOW, PLOT, CHECK):
        documents = [kept(name) for name in {SHOW: SHOWN, PLOT: PLOTTED, CHECK: CHECKED}[command]]
    elif command is ROUTING:
        header, after = routing(tmp_path)
        documents = [header]
        command = Command(command.words, command.name, lambda found: _sized(as_json(found)))
    else:
        documents = [json.loads(PARAMETERS.read_text())]
    examples = {PLOT: 6, CHECK: 12, PREDICT: 12}.get(command, 40)
    endures(command, documents, tmp_path, examples * times, after)


def _sized(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header
