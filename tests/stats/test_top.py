"""Files of counters beside a running job, and the frame that `moecomm top` shows of them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import moecomm
from moecomm.errors import BadInput
from moecomm.observe.stats import top
from moecomm.observe.stats.publish import Publisher
from moecomm.testing import LocalBuffers
from moecomm.tools.cli import app

from .matrices import job, usual
from .test_counters import SIZES, TOPK, x_of

JOB = """
import time, torch, moecomm
from pathlib import Path

with moecomm.Buffer("self", hidden=64, num_experts=2, topk=1, max_tokens=4, backend="host") as buffer:
    buffer.dispatch(torch.ones(4, 64, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (files := list(Path({folder!r}).glob("*.json"))):
        time.sleep(0.01)
    print(len(files))
    import sys; sys.stdin.readline()
print(len(list(Path({folder!r}).glob("*.json"))))
"""


def text_of(views: list[top.RankView], now_ns: int | None = None) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(top.frame(views, now_ns))
    return captured.get()


def published(folder: Path, samples: int = 2) -> None:
    """The files of two ranks, with a dispatch before each sample.  They stay when the Buffers are closed."""
    live = folder.parent / f"{folder.name}-live"
    with LocalBuffers(2, **SIZES) as ranks:
        publishers = [Publisher(live) for _ in ranks.buffers]
        ids = torch.zeros(6, TOPK, dtype=torch.int64)
        for _ in range(samples):
            ranks.dispatch([{"x": x_of(ids), "topk_idx": ids}] * 2)
            for publisher, buffer in zip(publishers, ranks.buffers, strict=True):
                publisher.publish([buffer.rounds])
        for file in live.iterdir():
            os.link(file, folder / file.name)
    assert list(live.iterdir()) == []


def test_a_frame_shows_rates_of_the_last_seconds(tmp_path: Path) -> None:
    published(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name[-10:] for file in files] == ["rank0.json", "rank1.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    views = top.read(tmp_path)
    assert [(view.rank, view.ranks, view.stats.rounds) for view in views] == [(0, 2, 1), (1, 2, 1)]
    assert views[0].stats.rows_from.tolist() == [6, 6]  # of one dispatch: the second
    assert views[1].stats.rows_to.tolist() == [6, 0]
    shown = text_of(views)
    assert "2 of 2 ranks" in shown
    assert f"{views[0].where}" in shown
    first, last = (sample["time_ns"] for sample in json.loads(files[0].read_text())["samples"])
    assert f"{12 / ((last - first) / 1e9):.0f}" in shown  # rows in, a second


def test_one_sample_is_shown_as_it_is(tmp_path: Path) -> None:
    published(tmp_path, samples=1)
    assert [view.stats.rounds for view in top.read(tmp_path)] == [1, 1]


def views_of(waits: torch.Tensor) -> list[top.RankView]:
    counters = job(waits).by_rank
    return [top.RankView("b", r, len(counters), f"host:{r}", 10.0, s, 10**18) for r, s in enumerate(counters)]


def test_a_frame_says_what_stands_out() -> None:
    waits = usual(4)
    waits[0, :, 3] += 300_000_000
    waits[0, 3] = 0
    views = views_of(waits)
    shown = text_of(views, 10**18)
    assert 0 < shown.index("rank 3 comes late") < shown.index("process"), "above the table, whose end may be cut"
    assert "nothing stands out" in text_of(views_of(usual(4)), 10**18)
    assert "silent" not in text_of(views, 10**18)
    assert "silent for 60 s" in text_of([replace(views[0], written_ns=10**18 - 60 * 10**9), *views[1:]], 10**18)
    assert "no counters of rank 1, 2" in text_of([views[0], views[3]], 10**18)


def test_the_command_prints_a_frame(tmp_path: Path) -> None:
    published(tmp_path)
    result = CliRunner().invoke(app, ["top", str(tmp_path), "--once"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "2 of 2 ranks" in result.output
    for word in ("rounds/s", "header", "process"):
        assert word in result.output
    rows = [line.split() for line in result.output.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["0", "1"] and all(row[6].endswith("%") for row in rows), "whole columns"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "rank": 3, "ranks": 2}',
        '{"format": 1, "rank": 0, "ranks": 1, "host": "h", "pid": 1, "samples": []}',
        '{"format": 1, "rank": 0, "ranks": 1, "host": "h", "pid": 1, "buffer": "b", "samples": [{"time_ns": 0, "stats": {}}, {"time_ns": 0, "stats": {}}]}',  # noqa: E501
    ],
)
def test_what_is_no_file_of_counters_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match="FOLDER"):
        top.read(tmp_path)
    (tmp_path / "moecomm-top-x-rank0.json").write_text(content)
    with pytest.raises(BadInput, match="FOLDER"):
        top.read(tmp_path)


@pytest.mark.parametrize("change", ["rounds", "shape", "floats"])
def test_counters_of_another_shape_are_refused(tmp_path: Path, change: str) -> None:
    published(tmp_path)
    file = sorted(tmp_path.iterdir())[0]
    found = json.loads(file.read_text())
    stats = found["samples"][1]["stats"]
    stats.update({"rounds": {"rounds": "1"}, "shape": {"rows_from": [1]}, "floats": {"rows_to": [0.5, 1]}}[change])
    file.write_text(json.dumps(found))
    with pytest.raises(BadInput, match="FOLDER"):
        top.read(tmp_path)


def test_a_job_publishes_where_the_environment_says_and_removes_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "top"
    environment = {**os.environ, "MOECOMM_TOP_DIR": str(folder)}
    command = [sys.executable, "-c", JOB.format(folder=str(folder))]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "1\n"
        [view] = top.read(folder)
        assert (view.rank, view.ranks) == (0, 1)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
    assert process.returncode == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("MOECOMM_TOP_DIR", str(tmp_path))
    with pytest.raises(BadInput, match="MOECOMM_TOP_DIR"):
        moecomm.Buffer("self", **SIZES)
