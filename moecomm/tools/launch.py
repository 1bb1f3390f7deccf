"""A launcher that runs a function in one local process per rank; the demo and the benchmarks use it.

The launcher leaves nothing behind. Ranks find each other through an unnamed file that no other user can open, and
connect over the loopback interface. Results return as JSON over pipes. A rank whose parent has exited, for any reason,
exits too.
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
from moecomm.base.protocol import MAX_RANKS
from moecomm.base.validation import check_integer, check_real
from moecomm.errors import BadInput, MoecommError, RoundFailed

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from moecomm.tools.launch import run_child
run_child(*sys.argv[2:])
"""
_GRACE_S = 3.0  # time for peers to report after the first failure, and to exit when asked to


@dataclass
class Failure:
    """The failure of one rank: the name of its error and the message."""

    rank: int
    error: str
    text: str
    consequence: bool  # true if another rank's failure caused it

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}: {self.text}"


class RanksFailed(MoecommError):
    """At least one rank failed. `failures` lists the cause first, then the failures that followed from it."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    results: int  # file descriptor of the pipe
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
    """Call `target` in `ranks` processes as function(group, **job), where `group` is the gloo group of these processes.

    Ctrl-C ends every rank, then raises KeyboardInterrupt.

    Args:
        target: "module:function".
        job: keyword arguments, as JSON values.
        ranks: number of processes.
        limit_s: seconds after which ranks that still run are ended and count as failures named Timeout.

    Returns:
        The (JSON) return value of each rank, by rank.

    Raises:
        BadInput: an argument is invalid.
        RanksFailed: at least one rank failed.
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
    if not failures:  # after a failure, the launcher does not wait for the remaining ranks
        failures = [Failure(rank, "Timeout", f"had not ended after {limit_s:g} s", consequence=False) for rank in late]
    if failures:
        raise RanksFailed(sorted(failures, key=lambda f: f.consequence))
    return outcomes


def _start(target: str, job: bytes, rank: int, ranks: int, store: int) -> _Child:
    results, theirs = os.pipe()
    arguments = [json.dumps(sys.path), target, rank, ranks, store, theirs]
    # Children run in their own session: Ctrl-C reaches only the parent, which then ends all of them.
    command = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, pass_fds=[store, theirs], start_new_session=True
    )
    os.close(theirs)
    assert process.stdin is not None
    # The child reads one line. Its standard input then stays open; end of file tells the child that the parent is gone.
    with contextlib.suppress(BrokenPipeError):  # the child is dead already; outcome() reports it
        process.stdin.write(job)
    return _Child(rank, process, results)


def _collect(children: list[_Child], limit_s: float) -> None:
    """Read results until all ranks have ended, `limit_s` has passed, or _GRACE_S has passed after the first failure."""
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
    """Run in a child process: join the group, call the function, report the result or the failure."""
    line = _read_line(0)
    if not line:
        os._exit(1)  # the parent is gone
    job = json.loads(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(ranks)))
    try:
        module, function = target.split(":")
        work = getattr(importlib.import_module(module), function)
        file = FileStore(f"/proc/self/fd/{store}", int(ranks))
        with config.variables({"GLOO_SOCKET_IFNAME": "lo"}):  # also for groups that `work` creates
            dist.init_process_group("gloo", store=file, rank=int(rank), world_size=int(ranks))
            message = {"result": work(dist.group.WORLD, **job)}
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        if not isinstance(error, MoecommError):
            traceback.print_exc()
        # A RuntimeError of gloo means that a peer went away.
        consequence = isinstance(error, RoundFailed) or (type(error) is RuntimeError and "gloo" in str(error).lower())
        message = {"failure": [type(error).__name__, str(error), consequence]}
    with os.fdopen(int(results), "wb") as pipe:
        pipe.write(json.dumps(message).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "failure" in message else 0)  # skips destructors of a group that has lost a rank


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
