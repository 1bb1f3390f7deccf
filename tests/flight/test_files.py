"""Files of flight records: when they are written, and who may read them."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.observe import flight

from ..backends.conftest import all_ranks
from ..fresh_python import run_python
from ..live import shorten

SIZES = '{"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 4, "backend": "host"}'
PROGRAM = f"""
import os, signal, sys, threading, torch, moecomm
def opened():
    return moecomm.Buffer("self", **{SIZES})
def dispatch(buffer):
    buffer.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64))
"""


def run(folder: Path | None, code: str) -> subprocess.CompletedProcess[str]:
    """A program with open Buffers, in a process of its own."""
    variables = {} if folder is None else {"MOECOMM_FLIGHT_DIR": str(folder)}
    return run_python("-c", PROGRAM + code, timeout_s=120, **variables)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


KILL = "os.kill(os.getpid(), signal.SIGTERM)\n"


def test_sigterm_writes_the_records_of_open_buffers_and_ends_the_process(tmp_path: Path) -> None:
    told = run(
        tmp_path / "new", f"one, two, three = opened(), opened(), opened(); dispatch(two); three.close()\n{KILL}"
    )
    assert told.returncode == -signal.SIGTERM, told.stderr
    found = written(tmp_path / "new")
    assert sorted(len(record["entries"]) for record in found) == [0, 1]
    assert all(record["moecomm"]["reasons"] == ["SIGTERM"] for record in found)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}


@pytest.mark.parametrize("handler", ["lambda number, frame: print('theirs', number)", "signal.SIG_IGN"])
def test_sigterm_goes_on_to_the_handler_that_was_there(tmp_path: Path, handler: str) -> None:
    code = f"signal.signal(signal.SIGTERM, {handler})\nbuffer = opened()\n{KILL}{KILL}print('alive')"
    told = run(tmp_path / "new", code)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == [*(["theirs", "15"] * 2 if "theirs" in handler else []), "alive"]
    (record,) = written(tmp_path / "new")
    assert record["moecomm"]["reasons"] == ["SIGTERM"] * 2


def test_without_a_folder_no_handler_is_installed_and_nothing_is_written(tmp_path: Path) -> None:
    told = run(None, "buffer = opened(); print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n1 // 0")
    assert told.stdout.split() == ["True"] and told.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_is_not_the_main_one_installs_no_handler(tmp_path: Path) -> None:
    code = (
        "threads = [threading.Thread(target=lambda: opened())]\n"
        "[(t.start(), t.join()) for t in threads]\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n"
        "buffer = opened(); print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    told = run(tmp_path, code)
    assert told.returncode == 0 and told.stdout.split() == ["True", "False"], told.stderr


def test_an_exception_that_ends_the_program_writes(tmp_path: Path) -> None:
    told = run(tmp_path, "buffer = opened(); dispatch(buffer); {}['lost']")
    assert told.returncode == 1
    (record,) = written(tmp_path)
    assert record["moecomm"]["raised"] == "KeyError: 'lost'" and len(record["entries"]) == 1


def test_a_program_that_ends_well_writes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "buffer = opened(); dispatch(buffer)").returncode == 0
    assert written(tmp_path) == []


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = f"buffer = opened()\nif os.fork() == 0:\n    {KILL}else:\n    print(os.wait()[1])"
    told = run(tmp_path, code)
    assert told.returncode == 0 and told.stdout.split() == ["15"], told.stderr
    assert written(tmp_path) == []


def open_pair(monkeypatch: pytest.MonkeyPatch, folder: Path, body: Any) -> list[dict[str, Any]]:
    """Two ranks on threads run `body(rank, buffer)`, inside of their Buffers; return the records in order of ranks."""
    monkeypatch.setenv("MOECOMM_FLIGHT_DIR", str(folder))
    monkeypatch.setattr(flight, "_installed", True)  # not in the process of the tests

    def run_rank(group: Any) -> None:
        ends, sizes = contextlib.suppress(moecomm.MoecommError, ZeroDivisionError), json.loads(SIZES)
        with ends, moecomm.Buffer(group, **sizes) as buffer:
            body(group.rank, buffer)

    all_ranks(2, run_rank)
    return written(folder)


def dispatch(buffer: moecomm.Buffer, **more: Any) -> None:
    buffer.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64), **more)


def test_each_rank_writes_a_timeout_with_what_the_failure_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def body(rank: int, buffer: moecomm.Buffer) -> None:
        shorten(buffer, 2)
        dispatch(buffer)
        if rank == 0:
            try:
                dispatch(buffer)
            finally:
                ended.set()
        ended.wait(20)
        dispatch(buffer)

    first, second = open_pair(monkeypatch, tmp_path, body)
    assert first["moecomm"]["reasons"] == second["moecomm"]["reasons"] == ["Timeout"]
    assert first["moecomm"]["buffer"] == second["moecomm"]["buffer"]
    assert [entry["state"] for entry in first["entries"]] == ["completed", "failed"]
    (failure,) = first["moecomm"]["failures"]
    known = {name: failure["record"][name] for name in ("op", "phase", "rank", "peer", "round")}
    assert known == {"op": "dispatch", "phase": "header", "rank": 0, "peer": 1, "round": 2}
    assert failure["record"]["waited_ns"] >= 0.3e9


def test_a_failure_that_no_call_has_raised_yet_is_in_the_record() -> None:
    """As on GPUs, where a round fails beside the host."""
    with moecomm.Buffer("self", **json.loads(SIZES)) as buffer:
        dispatch(buffer)
        seen: list[Any] = []
        raise_failure = buffer.rounds.raise_failure

        def look() -> None:
            seen.extend(buffer.flight_record()["moecomm"]["failures"])
            raise_failure()

        buffer.rounds.raise_failure = look  # type: ignore[method-assign]
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), torch.full((2, 1), 9))
        assert [failure["error"] for failure in seen] == ["BadInput"]
        del buffer.rounds.raise_failure
        record = buffer.flight_record()
        assert [failure["error"] for failure in record["moecomm"]["failures"]] == ["BadInput"]
        assert [entry["state"] for entry in record["entries"]] == ["completed", "failed"]


def test_a_mismatch_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, buffer: moecomm.Buffer) -> None:
        with pytest.raises(moecomm.Mismatch):
            dispatch(buffer, layout=("flat", "expert")[rank])
        with pytest.raises(moecomm.OutOfStep):
            dispatch(buffer)

    for record in open_pair(monkeypatch, tmp_path, body):
        assert record["moecomm"]["reasons"] == ["Mismatch"]
        assert [entry["state"] for entry in record["entries"]] == ["failed"]


def test_an_exception_that_leaves_the_block_of_a_buffer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, buffer: moecomm.Buffer) -> None:
        dispatch(buffer)
        if rank == 1:
            _ = 1 // 0
        dispatch(buffer)

    first, second = open_pair(monkeypatch, tmp_path, body)
    assert (first["moecomm"]["reasons"], first["moecomm"]["raised"]) == (["PeerLost"], "")
    assert second["moecomm"]["raised"].startswith("ZeroDivisionError: ")


def test_a_folder_that_others_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("MOECOMM_FLIGHT_DIR", str(tmp_path))
    with pytest.raises(moecomm.BadInput, match="MOECOMM_FLIGHT_DIR"):
        moecomm.Buffer("self", **json.loads(SIZES))


def test_an_error_is_raised_though_its_record_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, buffer: moecomm.Buffer) -> None:
        tmp_path.chmod(0o777)
        with pytest.raises(moecomm.Mismatch):
            dispatch(buffer, layout=("flat", "expert")[rank])

    assert open_pair(monkeypatch, tmp_path, body) == []
    assert "no flight record was written" in caplog.text


def test_a_record_on_demand_is_private_too(tmp_path: Path) -> None:
    with moecomm.Buffer("self", **json.loads(SIZES)) as buffer:
        dispatch(buffer)
        path = tmp_path / "folder" / "mine.json"
        for _ in range(2):
            buffer.dump_flight_record(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(json.loads(path.read_text())["entries"]) == 1
