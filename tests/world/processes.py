"""python -m tests.world.processes CASES [--first SEED]: cases whose ranks are processes, killed and interrupted.

Ranks are forked from a process of one thread: a fork of several may have a lock that nobody opens.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import moecomm

from .case import Case
from .draw import draw_case
from .program import Failure, Program
from .shorten import program_of

LIMIT_S = 120.0  # for a case
LATER_S = 0.002  # after the begin of a call, for a kill in the middle of it


class Processes:
    """Runs a case with a process for each rank.

    Args:
        case: to run.
        timeout_s: of its Buffers.
    """

    processes = True
    rounds_fail = True

    def __init__(self, case: Case, timeout_s: float = 10.0) -> None:
        self.case, self.timeout_s = case, timeout_s
        self._store: Any = None
        self.made: dict[str, int] = {}

    # In a rank.

    def group(self, name: str, members: list[int], member: int) -> Any:
        """Return a member's part of a group, which all ask for by the same name."""
        return dist.ProcessGroup(dist.PrefixStore(f"{name}/", self._store), members.index(member), len(members))

    def open(self, program: Program, group: Any, sizes: dict[str, Any]) -> Any:
        """Open the Buffer of a rank."""
        return moecomm.Buffer(group, **sizes, device="cpu", timeout_s=self.timeout_s)

    def meet(self, name: str, members: list[int], member: int) -> None:
        """Wait until all these members have come."""
        if self._store.add(f"meet {name}", 1) == len(members):
            self._store.set(f"met {name}", b"1")
        self._store.get(f"met {name}")

    def tell(self, name: str, value: bool) -> None:
        """Tell ranks that take no part."""
        self._store.set(f"told {name}", b"1" if value else b"0")

    def hear(self, name: str) -> bool:
        """Return what the ranks that take part have told."""
        return bool(self._store.get(f"told {name}") == b"1")

    def stopped(self) -> bool:
        """Return whether a rank has failed: then this process is ended from outside."""
        return False

    def kill(self, run: Callable[[], Any], later: bool) -> None:
        """End this process without a word, at once or in the middle of a call."""
        if later:
            timer = threading.Timer(LATER_S * (os.getpid() % 7) / 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.start()
            run()
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupted(self, run: Callable[[], Any], delay: float) -> Callable[[], Any]:
        """Return a call in which Ctrl-C comes after so many seconds, or just after it."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        def call() -> Any:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-4))
            result = run()
            while signal.getitimer(signal.ITIMER_REAL)[0]:
                time.sleep(1e-4)
            return result

        return call

    def _main(self, member: int, port: memoryview, pipe: int) -> None:
        logging.getLogger("moecomm").setLevel(logging.ERROR)
        failure, made = None, {}
        try:
            while port[0] == 0:
                time.sleep(1e-3)
            store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
            store.set_timeout(timedelta(seconds=LIMIT_S))
            self._store = store
            program = Program(self.case, member, self)
            failure, made = program.run(), program.made
            outcomes = program.outcomes
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            failure, outcomes = Failure(-1, member, repr(error)), {}
        said = {"failure": asdict(failure) if failure else None, "made": made, "outcomes": outcomes}
        os.write(pipe, json.dumps(said).encode())

    # In the process that starts them.

    def run(self) -> Failure | None:
        """Run the case; return the first failure."""
        port = memoryview(mmap.mmap(-1, 8)).cast("q")  # of the store, whose threads begin after the last fork
        pids: dict[int, int] = {}
        pipes: dict[int, int] = {}
        for member in range(self.case.ranks):
            here, there = os.pipe()
            if (pid := os.fork()) == 0:
                self._main(member, port, there)
                os._exit(0)
            os.close(there)
            pids[member], pipes[member] = pid, here
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives the ranks
        port[0] = server.port
        said = dict.fromkeys(pids, b"")
        found: Failure | None = None
        begin, end = time.monotonic(), 0.0  # others may have failed before the first that says so
        ends: dict[int, dict[str, str]] = {}
        while pipes and (found is None or time.monotonic() < end):
            if found is None and time.monotonic() - begin > LIMIT_S:
                found = Failure(-1, min(pipes), f"ranks {sorted(pipes)} have not ended in {LIMIT_S} s")
            ready, _, _ = select.select(list(pipes.values()), [], [], 0.05)
            for member, pipe in list(pipes.items()):
                if pipe not in ready:
                    continue
                data = os.read(pipe, 1 << 16)
                said[member] += data
                if not data:
                    os.close(pipes.pop(member))
                    if said[member]:
                        told = json.loads(said[member])
                        if failure := told["failure"]:
                            end = end or time.monotonic() + 1
                            each = Failure(**failure)
                            found = each if found is None or each.when < found.when else found
                        ends[member] = told["outcomes"]
                        self.made = self.made or told["made"]
        for pipe in pipes.values():
            os.close(pipe)
        for member, pid in pids.items():
            if found is not None:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if found is None and (status and not killed):
                found = Failure(-1, member, f"ended with status {status}")
        for at in sorted({at for end in ends.values() for at in end}):
            if found is None and len({end[at] for end in ends.values() if at in end}) > 1:
                found = Failure(int(at), 0, f"ranks end in different ways: {ends}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.world.processes", description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks of a case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(given.first, given.first + given.cases):
        case = draw_case(seed, given.ranks)
        failure = Processes(case).run()
        if failure is not None:
            failed += 1
            print(program_of(case, failure, "Processes"), flush=True)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
