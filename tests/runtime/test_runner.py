"""Known calls of a GPU rank, against a driver that only says what it was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .test_driver import with_driver

# A CPU rank stands for the rank: its rounds go to the driver, or, where its session has to look, are run here.
PROGRAM = """
import os
import torch
import moecomm
from moecomm import _native

CONTEXT, STREAM = 0x77, 0  # of the driver, and of a torch without GPUs
queue = _native.LaunchQueue(0, CONTEXT)
session_runs = []

def runner(execute, function):
    def otherwise(args):
        session_runs.append(function)
        execute(args)
    def make(self, args):
        return _native.GpuRunner(queue, otherwise, function, args.workers, 512, 4096, False, 1)
    return make

from moecomm.backends.host import HostSession
execute = _native.HostRunner(_native.Turn())
HostSession.dispatcher = runner(execute, 0xabc)
HostSession.combiner = runner(execute, 0xabd)
buffer = moecomm.Buffer("self", hidden=64, num_experts=4, topk=2, max_tokens=4, backend="host")
rounds = buffer.rounds
known = (rounds.plans.table, rounds.memory.parts, rounds.flight, rounds.turn, rounds.session.context.record)
rounds.known_calls = _native.KnownCalls(*known, on_host=False)
x, ids = torch.ones(4, 64, dtype=torch.bfloat16), torch.arange(8).view(4, 2) % 4

def calls(about):
    session_runs.clear()
    routed = buffer.dispatch(x, ids)
    buffer.combine(torch.ones(routed.handle.y_shape, dtype=torch.bfloat16), routed.handle)
    print(about, [hex(function) for function in session_runs], flush=True)

calls("first call")
calls("no round on a stream")
queue.last_stream, queue.used = STREAM, True
calls("known call")
queue.last_stream = 0x40
calls("another stream")
queue.last_stream = STREAM
for change in ("FAKE_CAPTURING", "FAKE_OTHER_CONTEXT"):
    os.environ[change] = "1"
    calls(change)
    del os.environ[change]
calls("known call")
"""


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch asks the driver for its streams, and there is none",
)
def test_a_known_call_is_launched_without_the_session(tmp_path: Path) -> None:
    by_session = "['0xabc', '0xabd']"
    said = with_driver(tmp_path, PROGRAM, load="")
    launched = ["plain 0xabc 1 512 4096 (nil)", "plain 0xabd 1 512 4096 (nil)", "known call []"]
    assert [line.rpartition(" ")[0] if line.startswith("plain") else line for line in said] == [
        f"first call {by_session}",
        f"no round on a stream {by_session}",
        *launched,
        f"another stream {by_session}",
        f"FAKE_CAPTURING {by_session}",
        f"FAKE_OTHER_CONTEXT {by_session}",
        *launched,
    ]
