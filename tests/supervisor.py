"""The supervisor of a job of CPU ranks (tests/rejoin.py): it starts, kills, stops and replaces processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from . import rejoin
from .rejoin import EXCLUDED, NAP_S, NOT_JOINED, Job, Member

_KILLED = -signal.SIGKILL


class Supervisor:
    """Keep a job of `ranks` processes.

    Args:
        folder: an empty one.
        member: makes the Member of a process.
        ranks: how many the job has when all are there.
        draw: of the order of ranks; None: by the age of their processes.
        processes: the most that may be started, one after the other.
        spares: how many may wait until they are wanted, because a process on a GPU takes seconds until it can join.
        expected: processes that the job needs in all, if known: no spare is started beyond.
    """

    def __init__(
        self,
        folder: Path,
        member: Callable[[Job, int], Member],
        ranks: int,
        draw: random.Random | None,
        processes: int = 256,
        spares: int = 0,
        expected: int = 256,
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.job = Job(folder, processes, self._store.port)
        self.ranks, self._member, self._draw = ranks, member, draw
        self._spares, self._expected = spares, expected
        self._waiting = deque[Any]()  # processes that have not been called
        self._context: Any = multiprocessing.get_context("fork")
        self._running: dict[int, Any] = {}
        self.killed: set[int] = set()
        self.excluded: set[int] = set()
        self.pids: set[int] = set()
        self.started = 0

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = (*self._running.values(), *self._waiting)
        for process in left:
            process.kill()
        for process in left:
            process.join()

    @property
    def alive(self) -> list[int]:
        """The processes that run, and have not been killed."""
        return [process for process in self._running if process not in self.killed]

    @property
    def members(self) -> list[int]:
        """Those of them that have joined."""
        return [process for process in self.alive if self.job.get("life", process)]

    def kill(self, process: int) -> None:
        """Kill a process, and note the time."""
        self.killed.add(process)
        self.job.set("died_ns", time.monotonic_ns(), process)
        os.kill(self._running[process].pid, signal.SIGKILL)

    def signal(self, process: int, number: int) -> None:
        """Send a signal to a process."""
        os.kill(self._running[process].pid, number)

    def fill(self, sizes: dict[str, Any], reopen: bool = False) -> list[int]:
        """Invite the processes that have joined, and new ones in place of all others; return the new ones.

        Those that wait for an earlier invitation are killed.
        """
        for process in set(self.alive) - set(self.members):
            self.kill(process)
        there = self.members
        new = list(range(self.started, self.started + self.ranks - len(there)))
        order = there + new
        if self._draw is not None:
            self._draw.shuffle(order)
        made = self.job.invite(order, sizes, reopen)
        self._start(len(new) - len(self._waiting))
        for process in new:
            self._running[process] = self._waiting.popleft()
            self.job.set("called", made.number, process)
        self.started += len(new)
        self._start(min(self._spares, self._expected - self.started) - len(self._waiting))
        return new

    def _start(self, count: int) -> None:
        """Start processes that wait until they are called, in the order of their ids."""
        for _ in range(count):
            arguments = self.job, self.started + len(self._waiting), self._member
            process = self._context.Process(target=rejoin.main, args=arguments)
            process.start()
            self.pids.add(process.pid)
            self._waiting.append(process)

    def wait(self, until: Callable[[], bool], timeout_s: float = 60) -> None:
        """Wait for something of the job.

        Raises:
            AssertionError: it has not come in time, or a process has failed.
        """
        deadline = time.monotonic() + timeout_s
        while not until():
            self._look()
            assert time.monotonic() < deadline, f"nothing after {timeout_s} s: {self._shown()}"
            time.sleep(NAP_S)

    def made(self, processes: list[int], rounds: int) -> bool:
        """Return whether these processes are the ranks of a Buffer, and have made so many rounds since it is open."""
        return all(
            self.job.get("ranks", process) == len(processes) and self.job.get("number", process) >= rounds
            for process in processes
        )

    def full(self, rounds: int) -> bool:
        """Return whether the job has all ranks, and has made so many rounds since."""
        return len(there := self.members) == self.ranks and self.made(there, rounds)

    def stop(self) -> None:
        """Stop the job."""
        self.job.set("stopping", 1)
        self.wait(lambda: not self._running)

    def _look(self) -> None:
        assert all(process.is_alive() for process in self._waiting), "a spare process has ended"
        for number, process in list(self._running.items()):
            if process.is_alive():
                continue
            process.join()
            code = process.exitcode
            process.close()
            del self._running[number]
            if code == EXCLUDED:
                self.excluded.add(number)
            if code not in (_KILLED if number in self.killed else None, NOT_JOINED, EXCLUDED, 0):
                raise AssertionError(
                    f"process {number} has ended with {code}: {self.job.events(number)[-1:]}; {self._shown()}"
                )

    def _shown(self) -> str:
        words = ("waits_for", "life", "number", "ranks")
        states = {one: {word: self.job.get(word, one) for word in words} for one in self.alive}
        return f"{states}, invited {self.job.get('invited')}, events {[self.job.events(one)[-2:] for one in states]}"
