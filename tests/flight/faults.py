"""Random faults of one rank of a real job on CPUs, each rank of which writes its flight record."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import moecomm

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 12, "topk": 2, "max_tokens": 8, "backend": "host"}
LAYOUTS = ("flat", "expert", "batched")
CALLS = 40  # before the fault, at most
# Statements of the records about the rank.
HOW = {
    "killed between calls": {"absent"},
    "killed at any moment": {"absent"},
    "silent": {"no call"},
    "silent, then killed": {"absent"},
    "another operation": {"another call"},
    "another layout": {"another call"},
    "raises": {"exception"},
    "bad input": {"failed call"},
    "bad input, and goes on": {"failed call"},
}


class Fault(NamedTuple):
    """The fault of one rank, which comes before its call `at`."""

    kind: str
    ranks: int
    victim: int
    at: int
    seed: int

    @classmethod
    def random(cls, seed: int) -> Fault:
        choose = random.Random(seed)
        kind = list(HOW)[seed % len(HOW)]
        # With two ranks, nobody can say which of them made the other call.
        ranks = choose.randint(3 if kind.startswith("another") else 2, 4)
        return cls(kind, ranks, choose.randrange(ranks), choose.randint(1, CALLS), seed)


def next_call(choose: random.Random, dispatched: bool) -> tuple[bool, str]:
    """Draw the next call: a combine, or a dispatch with a layout.  `dispatched`: there was a dispatch before."""
    return choose.random() < 0.5 and dispatched, choose.choice(LAYOUTS)


def run_rank(rank: int, group: Any, fault: Fault, folder: str) -> str:
    """Make calls until a fault ends them; return the name of the error."""
    records = Path(folder) / "records"
    os.environ["MOECOMM_FLIGHT_DIR"] = str(records)
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    timeout_s = 0.6 if fault.kind.startswith("silent") else 20
    error = ""
    try:
        with moecomm.Buffer(group, **SIZES, timeout_s=timeout_s) as buffer:
            _Program(rank, buffer, fault).run()
    except moecomm.MoecommError as raised:
        error = type(raised).__name__
    except ZeroDivisionError:
        error = "ZeroDivisionError"
    if fault.kind.startswith("silent"):
        _end(int(Path(folder, f"pid{fault.victim}").read_text()), fault.kind)
    return error


def _end(pid: int, kind: str) -> None:
    """End the silent rank, as a launcher does, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM if kind == "silent" else signal.SIGKILL)
        deadline = time.monotonic() + 20
        while _lives(pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class _Program:
    """The calls of one rank: the same on all, but for the fault."""

    def __init__(self, rank: int, buffer: moecomm.Buffer, fault: Fault) -> None:
        self._mine, self._buffer, self._fault = rank == fault.victim, buffer, fault
        self._choose = random.Random(fault.seed)
        tokens = 1 + (rank + fault.seed) % 8
        self._x = torch.ones(tokens, 64, dtype=torch.bfloat16)
        self._ids = torch.stack([torch.arange(tokens) % 12, (torch.arange(tokens) + 5) % 12], dim=1)
        self._last: list[tuple[torch.Tensor, moecomm.Handle]] = []

    def run(self) -> None:
        for call in range(100_000):
            if self._mine and call == self._fault.at and self._begin_fault():
                continue
            combines, layout = next_call(self._choose, bool(self._last))
            if combines:
                self._combine()
            else:
                self._dispatch(layout)

    def _dispatch(self, layout: Any) -> None:
        routed = self._buffer.dispatch(self._x, self._ids, layout=layout)
        self._last = [(routed.x, routed.handle)]

    def _combine(self) -> None:
        self._buffer.combine(*self._last[0])

    def _begin_fault(self) -> bool:
        """Do it, and return whether it takes the place of a call."""
        kind = self._fault.kind
        if kind == "killed between calls":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed at any moment":
            after = random.Random(-self._fault.seed).uniform(0, 0.02)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if kind.startswith("silent"):
            while True:
                signal.pause()
        if kind == "raises":
            _ = 1 // 0
        if kind == "bad input":
            self._buffer.dispatch(self._x.double(), self._ids)
        if kind == "bad input, and goes on":
            with suppress(moecomm.BadInput):
                self._buffer.dispatch(self._x.double(), self._ids)
            next_call(self._choose, bool(self._last))  # the one that has failed
            return True
        if kind.startswith("another"):
            combines, layout = next_call(self._choose, bool(self._last))
            if kind == "another operation" and not combines:
                self._combine()
            elif kind == "another layout" and not combines:
                self._dispatch(next(other for other in LAYOUTS if other != layout))
            else:
                self._dispatch(layout)
            return True
        return False


def shrink_once(rank: int, group: Any, folder: str) -> None:
    """Rank 2 dies, the others shrink, and then rank 1 gives up."""
    os.environ["MOECOMM_FLIGHT_DIR"] = folder
    x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 5], [11, 3]])
    with suppress(ZeroDivisionError, moecomm.PeerLost), moecomm.Buffer(group, **SIZES, timeout_s=20) as buffer:
        buffer.dispatch(x, ids)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            buffer.dispatch(x, ids)
        except moecomm.PeerLost:
            buffer.shrink()
        for _ in range(3):
            buffer.dispatch(x, ids)
        if rank == 1:
            _ = 1 // 0
        buffer.dispatch(x, ids)
