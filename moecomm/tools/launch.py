"""Runs a function as several processes of this machine, one a rank: what the demo and the benchmarks stand on.

Nothing is left behind: ranks find each other by a file without a name, which no other user can open, and connect over
the loopback interface.  Results come back as JSON over pipes, and a rank whose parent is gone, however it went, ends
itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from moecomm import config
from moecomm.core.integers import check_integer
from moecomm.core.protocol import MAX_RANKS
from moecomm.core.validation import check_real
from moecomm.errors import BadInput, MoecommError, RoundFailed

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from moecomm.tools.launch import run_child
run_child(*sys.argv[2:])
"""
_GRACE_S = 3.0  # for the other ranks to tell their side after the first failure, and to end when told to


@dataclass
class Failure:
    """How one rank failed: the name of its error and what it said."""

    rank: int
    error: str
    text: str
    consequence: bool  # of what happened to another rank

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}: {self.text}"


class RanksFailed(MoecommError):
    """At least one rank failed.  `failures`: the cause first, then what the other ranks made of it."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    results: int  # file descriptor
    said: bytearray = field(default_factory=bytearray)
    done: bool = False

    def outcome(self) -> Any | Failure:
        if self.said:
            message = json.loads(self.said)
            return Failure(self.rank, *message["failure"]) if "failure" in message else message["result"]
        try:
            code = self.process.wait(_GRACE_S)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "went silent"
        return Failure(self.rank, "ProcessEnded", f"the process {how}", consequence=False)


def launch(target: str, job: dict[str, Any], ranks: int, limit_s: float = float("inf")) -> list[Any]:
    """Calls `target` ("module:function") as function(group, **job) in `ranks` processes, whose gloo group that is.

    Returns what each rank returned (JSON), by rank.  Raises BadInput, RanksFailed; after `limit_s` seconds ranks
    that have not ended are failures, called Timeout, and are ended.  Ctrl-C ends every rank, then raises
    KeyboardInterrupt.
    """
    if not isinstance(target, str) or len(target.split(":")) != 2:
        raise BadInput("target", repr(target), '"module:function"')
    check_integer("ranks", ranks, 1, MAX_RANKS)
    check_real("limit_s", limit_s, 0, float("inf"))
    if not isinstance(job, dict):
        raise BadInput("job", type(job).__name__, "a dict")
    try:
        line = json.dumps(job).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise BadInput("job", str(error), "arguments by name, of what JSON has") from None
    store = os.memfd_create("moecomm-launch")
    children: list[_Child] = []
    try:
        for rank in range(ranks):
            children.append(_start(target, line, rank, ranks, store))
        _collect(children, limit_s)
        outcomes = [child.outcome() for child in children if child.done]
    finally:
        os.close(store)
        _end(children)
    failures = [o for o in outcomes if isinstance(o, Failure)]
    late = [child.rank for child in children if not child.done]
    if not failures:  # else the others were not waited for
        failures = [Failure(rank, "Timeout", f"had not ended after {limit_s:g} s", consequence=False) for rank in late]
    if failures:
        raise RanksFailed(sorted(failures, key=lambda f: f.consequence))
    return outcomes


def _start(target: str, job: bytes, rank: int, ranks: int, store: int) -> _Child:
    results, theirs = os.pipe()
    arguments = [json.dumps(sys.path), target, rank, ranks, store, theirs]
    # A session of their own: Ctrl-C reaches the parent alone, which then ends all of them.
    command = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, pass_fds=[store, theirs], start_new_session=True
    )
    os.close(theirs)
    assert process.stdin is not None
    # The child reads one line; then its standard input stays open, and its end tells the child that we are gone.
    with contextlib.suppress(BrokenPipeError):  # dead already: its outcome will say so
        process.stdin.write(job)
    return _Child(rank, process, results)


def _collect(children: list[_Child], limit_s: float) -> None:
    """Reads what the ranks say until all have ended, for `limit_s`, or for a short while after the first failure."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as waiting:
        for child in children:
            waiting.register(child.results, selectors.EVENT_READ, child)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(None if left == float("inf") else left):
                child = key.data
                if data := os.read(child.results, 1 << 16):
                    child.said += data
                    continue
                child.done = True
                waiting.unregister(child.results)
                if isinstance(child.outcome(), Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)


def _end(children: list[_Child]) -> None:
    for child in children:
        assert child.process.stdin is not None
        child.process.stdin.close()
        os.close(child.results)
    deadline = time.monotonic() + _GRACE_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def run_child(target: str, rank: str, ranks: str, store: str, results: str) -> None:
    """What a child process runs: meets the others, calls the function, reports."""
    line = _read_line(0)
    if not line:
        os._exit(1)  # the parent is gone already
    job = json.loads(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(ranks)))
    try:
        module, function = target.split(":")
        work = getattr(importlib.import_module(module), function)
        file = FileStore(f"/proc/self/fd/{store}", int(ranks))
        with config.variables({"GLOO_SOCKET_IFNAME": "lo"}):  # in the work, too, which may make groups
            dist.init_process_group("gloo", store=file, rank=int(rank), world_size=int(ranks))
            message = {"result": work(dist.group.WORLD, **job)}
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        if not isinstance(error, MoecommError):
            traceback.print_exc()
        # A RuntimeError of gloo is a peer that went away.
        consequence = isinstance(error, RoundFailed) or (type(error) is RuntimeError and "gloo" in str(error).lower())
        message = {"failure": [type(error).__name__, str(error), consequence]}
    with os.fdopen(int(results), "wb") as pipe:
        pipe.write(json.dumps(message).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "failure" in message else 0)  # not through destructors of a group that has lost a rank


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
