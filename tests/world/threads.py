"""Ranks as threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import moecomm

from .case import Case
from .program import Failure, Program

WAIT_S = 60.0


class Threads:
    """Runs a case with a thread for each rank.

    Args:
        case: to run.
        timeout_s: of its Buffers.
    """

    processes = False
    rounds_fail = True  # on some ranks, and others hear of it

    def __init__(self, case: Case, timeout_s: float = 10.0) -> None:
        self.case, self.timeout_s = case, timeout_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._groups: dict[str, Any] = {}
        self._barriers: dict[str, threading.Barrier] = {}
        self._told: dict[str, Future[bool]] = {}
        self._programs: list[Program] = []
        self.made: dict[str, int] = {}

    def group(self, name: str, members: list[int], member: int) -> Any:
        """Return a member's part of a group, which all ask for by the same name."""
        with self._lock:
            if name not in self._groups:
                self._groups[name] = moecomm.local_ranks(len(members))
            return self._groups[name][members.index(member)]

    def open(self, program: Program, group: Any, sizes: dict[str, Any]) -> Any:
        """Open the Buffer of a rank."""
        return moecomm.Buffer(group, **sizes, device="cpu", timeout_s=self.timeout_s)

    def meet(self, name: str, members: list[int], member: int) -> None:
        """Wait until all these members have come."""
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(len(members)))
        try:
            barrier.wait(WAIT_S)
        except threading.BrokenBarrierError as error:
            raise AssertionError(f"ranks do not meet at {name!r}") from error

    def tell(self, name: str, value: bool) -> None:
        """Tell ranks that take no part."""
        with self._lock:
            told = self._told.setdefault(name, Future())
            if not told.done():
                told.set_result(value)

    def hear(self, name: str) -> bool:
        """Return what the ranks that take part have told."""
        with self._lock:
            told = self._told.setdefault(name, Future())
        return told.result(WAIT_S)

    def stopped(self) -> bool:
        """Return whether a rank has failed."""
        return self._stop.is_set()

    def run(self) -> Failure | None:
        """Run the case; return the first failure."""
        found: list[Failure] = []
        self._programs = [Program(self.case, member, self) for member in range(self.case.ranks)]

        def run(program: Program) -> None:
            failure = program.run()
            if failure is not None:
                with self._lock:
                    found.append(failure)
                self._stop.set()
                for told in list(self._told.values()):
                    if not told.done():
                        told.set_result(False)
                for barrier in list(self._barriers.values()):
                    barrier.abort()
                for other in self._programs:
                    if (buffer := other.buffer) is not None:
                        buffer.abort()

        threads = [threading.Thread(target=run, args=(program,)) for program in self._programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for program in self._programs[:1]:
            self.made = program.made
        if found:
            return min(found, key=lambda failure: failure.when)
        return differing(self._programs)


def differing(programs: list[Any]) -> Failure | None:
    """Return a failure where calls that may end in several ways have ended in different ones on ranks."""
    for at in sorted({at for program in programs for at in program.outcomes}):
        ends = {program.member: program.outcomes[at] for program in programs if at in program.outcomes}
        if len(set(ends.values())) > 1:
            return Failure(at, min(ends), f"ranks end in different ways: {ends}")
    return None
