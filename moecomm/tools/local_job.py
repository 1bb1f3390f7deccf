"""A program on local ranks, as torchrun starts it, but the ranks that are left go on when one is lost.

The store of the ranks is in this process, so it outlives each of them. It listens on the loopback interface alone.
Ranks end with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

from moecomm import config
from moecomm.base.protocol import MAX_RANKS
from moecomm.base.validation import check_integer
from moecomm.errors import BadInput

_HOST = "127.0.0.1"
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
# Has the kernel kill this process with its parent (PR_SET_PDEATHSIG, which an execve keeps), then becomes the program.
_BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class _Told(Exception):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(program: list[str], ranks: int, say: Callable[[str], object]) -> int:
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
            processes.append(_start(program, rank, ranks, port))
        return _wait(processes, say)
    except _Told as told:
        return 128 + told.number
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # the ranks are being ended already
        _end(processes)
        for number, handler in before.items():
            signal.signal(number, handler)
        del store


def _tell(number: int, frame: FrameType | None) -> NoReturn:
    raise _Told(number)


def _start(program: list[str], rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
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
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            say(f"rank {rank} {how}; {left} of {len(processes)} ranks still run")
    failed = [code for code in codes if code > 0]
    lost = [128 - code for code in codes if code < 0]
    return failed[0] if failed else 0 if 0 in codes else lost[0]


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, and what they have started."""
    running = [process for process in processes if process.poll() is None]
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    _signal([process for process in running if process.poll() is None], signal.SIGKILL)
    for process in running:
        process.wait()


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
