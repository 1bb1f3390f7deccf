"""The loop of `moecomm top`: it follows the job, ends with it or on Ctrl-C, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from moecomm.errors import BadInput
from moecomm.observe.stats import top
from moecomm.observe.stats.publish import Publisher
from moecomm.testing import LocalBuffers

from ..fresh_python import beside_packages, run_python
from .test_counters import SIZES, TOPK, x_of

HIDDEN_CURSOR, SHOWN_CURSOR = "\x1b[?25l", "\x1b[?25h"
COMMAND = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches this process
from moecomm.tools.cli import main
main()
"""
WAIT_S = 60.0


class Job:
    """Ranks of this process that publish when they are told to."""

    def __init__(self, folder: Path, ranks: LocalBuffers) -> None:
        self._ranks, self._publishers = ranks, [Publisher(folder) for _ in ranks.buffers]

    def publish(self, dispatches: int = 1) -> None:
        ids = torch.zeros(6, TOPK, dtype=torch.int64)
        for _ in range(dispatches):
            self._ranks.dispatch([{"x": x_of(ids), "topk_idx": ids}] * len(self._publishers))
        for publisher, buffer in zip(self._publishers, self._ranks.buffers, strict=True):
            publisher.publish([buffer.rounds])

    def end(self) -> None:
        for publisher in self._publishers:
            publisher.publish([])


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> str:
    """Return what the loop writes to a terminal, with `sleep` in place of its pauses."""
    written = io.StringIO()
    monkeypatch.setattr(top.time, "sleep", sleep)
    try:
        top.watch(folder, Console(file=written, force_terminal=True, width=200, height=50))
    finally:
        monkeypatch.undo()
        assert written.getvalue().count(HIDDEN_CURSOR) == written.getvalue().count(SHOWN_CURSOR)
        assert written.getvalue().rfind(SHOWN_CURSOR) >= written.getvalue().rfind(HIDDEN_CURSOR)
    return written.getvalue()


def test_the_loop_follows_the_job_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the job's clock passes with each pause; it makes 1 dispatch before the first, then 7, 3 and none."""
    begun, pauses, left = time.time_ns(), [0.0], [7, 3]
    with LocalBuffers(2, **SIZES) as ranks:
        job = Job(tmp_path, ranks)

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if left:
                job.publish(left.pop(0))
            else:
                job.end()

        monkeypatch.setattr(time, "time_ns", lambda: begun + len(pauses) * 10**9)
        job.publish()
        shown = watched(tmp_path, monkeypatch, sleep)
    assert pauses[1:] == [1.0] * 3
    rates = re.findall(r"^ *0 +(\d+) ", shown, re.MULTILINE)
    assert rates == ["1", "7", "5", "5"]  # (7 + 3) / 2 s; the last frame stays
    assert shown.rstrip().endswith("all Buffers are closed")


def test_a_pipe_gets_every_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    frames = []

    def sleep(_: float) -> None:
        frames.append(written.getvalue().count("2 of 2 ranks"))  # each is there before the next pause
        if len(frames) == 3:
            for buffer in ranks.buffers:
                buffer.close()

    with LocalBuffers(2, **SIZES) as ranks:
        Job(tmp_path, ranks).publish()
        monkeypatch.setattr(top.time, "sleep", sleep)
        top.watch(tmp_path, Console(file=written, width=200))
    assert frames == [1, 2, 3] and HIDDEN_CURSOR not in written.getvalue()
    assert written.getvalue().rstrip().endswith("all Buffers are closed")


def test_a_program_that_ends_leaves_no_files(tmp_path: Path) -> None:
    """Whether it closes its Buffer or not, and without a further tick of the thread that writes."""
    program = """
import sys, time
from pathlib import Path
import moecomm

folder = Path(sys.argv[1])
buffers = [
    moecomm.Buffer("self", hidden=64, num_experts=4, topk=1, max_tokens=8, device="cpu") for _ in range(2)
]
deadline = time.monotonic() + 60
while len(list(folder.glob("*.json"))) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.01)
buffers[0].close()
print(len(list(folder.glob("*"))))
"""
    ran = run_python("-c", program, tmp_path, MOECOMM_TOP_DIR=str(tmp_path))
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_written_again_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has read counters, and is about to write when another one closes the Buffer."""
    with LocalBuffers(2, **SIZES) as ranks:
        job, closing = Job(tmp_path, ranks), ranks.buffers[0]
        job.publish()
        module = sys.modules[Publisher.__module__]  # the package has a function of its name
        content = module._content
        monkeypatch.setattr(module, "_content", lambda *given: (closing.close(), content(*given))[1])
        job.publish(0)
        assert [file.name[-10:] for file in tmp_path.iterdir()] == ["rank1.json"]


def test_control_c_ends_the_loop_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with LocalBuffers(2, **SIZES) as ranks:
        Job(tmp_path, ranks).publish()
        shown = watched(tmp_path, monkeypatch, interrupt)
    assert "2 of 2 ranks" in shown and "closed" not in shown


def test_a_file_of_another_kind_ends_the_loop_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBuffers(2, **SIZES) as ranks:
        Job(tmp_path, ranks).publish()
        with pytest.raises(BadInput, match="FOLDER"):
            watched(tmp_path, monkeypatch, lambda _: (tmp_path / "moecomm-top-x-rank0.json").write_text("{}") and None)


def test_the_command_refreshes_a_terminal_and_restores_it(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    with LocalBuffers(2, **SIZES) as first, LocalBuffers(2, **SIZES) as second:
        Job(tmp_path, first).publish()
        command = [sys.executable, "-c", COMMAND, "top", str(tmp_path)]
        terminal: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
        with subprocess.Popen(command, **beside_packages(tmp_path), **terminal) as process:
            try:
                shown = read_until(master, f"Buffer {first.buffers[0].rounds.origin.identity}, 2 of 2 ranks")
                Job(tmp_path, second).publish()
                shown += read_until(master, f"Buffer {second.buffers[0].rounds.origin.identity}, 2 of 2 ranks")
                assert HIDDEN_CURSOR in shown and SHOWN_CURSOR not in shown
                os.write(master, b"\x03")
                shown += read_until(master, SHOWN_CURSOR)
                assert process.wait(WAIT_S) == 0
            finally:
                process.kill()  # else a failure above waits for it for ever
    assert shown.count(HIDDEN_CURSOR) == 1
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def read_until(terminal: int, text: str) -> str:
    """Read until the text is there.  AssertionError with what is there instead, after WAIT_S."""
    shown, deadline = b"", time.monotonic() + WAIT_S
    while text.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready or time.monotonic() < deadline, (text, shown[-2000:])
        shown += os.read(terminal, 1 << 16)
    return shown.decode(errors="replace")
