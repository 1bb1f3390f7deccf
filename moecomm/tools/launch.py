"""The launcher of local ranks: of a function, for the demo and the benchmarks, and of a program, as torchrun starts it.

It leaves nothing behind: ranks connect over the loopback interface, and end with this process, whatever ends it.

- launch(), of a function: ranks find each other through an unnamed file that no other user can open. Results return as
  JSON over pipes. The first failure ends all ranks.
- run_program(): the store of the ranks is in this process, so it outlives each of them. The ranks that are left go on
  when one is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

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
_HOST = "127.0.0.1"
_TERM_GRACE_S = 10.0  # between SIGTERM and SIGKILL
# Has the kernel kill this process with its parent (PR_SET_PDEATHSIG, which an execve keeps), then becomes the program.
_BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


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
            how = _how(code)
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
    _end_within(_GRACE_S, [child.process for child in children])


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


class _Told(Exception):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_program(program: list[str], ranks: int, say: Callable[[str], object]) -> int:
    """Run a Python program on local ranks, and wait until each of them has ended.

    Ranks have the variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. A
    rank that a signal ends is lost, and the others are left alone. SIGINT and SIGTERM end all ranks, first by SIGTERM.

    Args:
        program: arguments of the Python interpreter: a file, or `-m` and a module, and those of the program.
        ranks: number of processes.
        say: takes a line for each rank that does not end with 0.

    Returns:
        The exit code of the job. 0: at least one rank has ended with 0, all others with 0 or by a signal. Else the
        first exit code that is not 0; if there is none, 128 + the number of the first signal. 128 + the number of a
        signal that has ended the job.

    Raises:
        BadInput: an empty program, or a number of ranks out of range.
    """
    if not program:
        raise BadInput("program", "none", "a Python file, or -m and a module")
    check_integer("ranks", ranks, 1, MAX_RANKS)
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = TCPStore(_HOST, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    processes: list[subprocess.Popen[bytes]] = []
    before = {number: signal.signal(number, _tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(ranks):
            processes.append(_start_program(program, rank, ranks, port))
        return _wait(processes, say)
    except _Told as told:
        return 128 + told.number
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # the ranks are being ended already
        _end_programs(processes)
        for number, handler in before.items():
            signal.signal(number, handler)
        del store


def _tell(number: int, frame: FrameType | None) -> NoReturn:
    raise _Told(number)


def _start_program(program: list[str], rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    # As an agent of torchrun: ranks then connect to its store, where rank 0 would open another.
    agent = {"USE_AGENT_STORE": "True", "RESTART_COUNT": "0", "RUN_ID": "moecomm"}
    given = {name: str(value) for name, value in places.items()}
    given |= {f"TORCHELASTIC_{name}": value for name, value in agent.items()}
    given |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with (
        config.variables(given, insist=True),
        config.variables({"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}),
    ):
        command = [sys.executable, "-c", _BOUND_TO_PARENT, str(os.getpid()), *program]
        # A session of its own: Ctrl-C reaches only the launcher, which then ends the ranks and what they have started.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(processes: list[subprocess.Popen[bytes]], say: Callable[[str], object]) -> int:
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def report(rank: int) -> None:
        ended.put((rank, processes[rank].wait()))

    for rank in range(len(processes)):
        threading.Thread(target=report, args=(rank,), daemon=True).start()
    codes: list[int] = []
    for left in reversed(range(len(processes))):
        rank, code = ended.get()
        codes.append(code)
        if code:
            say(f"rank {rank} {_how(code)}; {left} of {len(processes)} ranks still run")
    failed = [code for code in codes if code > 0]
    lost = [128 - code for code in codes if code < 0]
    return failed[0] if failed else 0 if 0 in codes else lost[0]


def _end_programs(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, and what they have started."""
    running = [process for process in processes if process.poll() is None]
    _signal(running, signal.SIGTERM)
    _end_within(_TERM_GRACE_S, running)


def _end_within(grace_s: float, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that have been asked to end, and kill those that have not in time."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    _signal([process for process in processes if process.poll() is None], signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
