"""Ranks of fused operators over Windows of CPU ranks, whose kernels run in the emulator, all at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import moecomm
from moecomm.overlap.gpu import GpuExecutor
from tests.backends.conftest import run_ranks

from .gemm_machine import compiled
from .machine import LIMIT, Launch
from .units import scheduler

BLOCKS = 2  # of a launch


class EmulatedRanks:
    """GpuExecutors of all ranks.  enqueue() makes a call on each; run() runs all that they have launched since."""

    def __init__(self, windows: list[moecomm.Window]) -> None:
        self.windows = windows
        self.executors = [GpuExecutor(window) for window in windows]
        self.seed = 0
        self._launches: list[tuple[int, Any, ctypes.Structure]] = []
        for executor in self.executors:
            executor._units = BLOCKS
            executor._launch = partial(self._add, executor._rank)  # type: ignore[method-assign]

    def _add(self, rank: int, kernel: Any, blocks: int, args: ctypes.Structure) -> None:
        self._launches.append((rank, kernel, args))

    def enqueue(self, operator: str, x: Sequence[Any], w: Sequence[Any], *more: Any) -> list[Any]:
        """Call an operator with the tensors of each rank, and return the results by rank: valid after run().

        With tensors of fewer ranks, the others do not come.
        """
        calls = [getattr(executor, operator) for executor in self.executors]
        return [call(*mine, *more) for call, mine in zip(calls, zip(x, w, strict=True), strict=False)]

    def run(self) -> None:
        """Run all launches.  Those of a rank begin one after the other, while others may be rounds ahead or behind."""
        given, self._launches = self._launches, []
        self.seed += 1
        launches, last = (Launch * len(given))(), dict.fromkeys(range(len(self.windows)), -1)
        for nth, (rank, kernel, args) in enumerate(given):
            entry = ctypes.cast(compiled(kernel).kernel, ctypes.c_void_p).value
            address = ctypes.addressof(args)
            launches[nth] = Launch(entry, address, BLOCKS, kernel.threads, kernel.shared_bytes, last[rank], 1)
            last[rank] = nth
        ended = scheduler().emulator_run(ctypes.addressof(launches), len(given), 10 * LIMIT, self.seed)
        assert ended == 0, "a kernel does not end"

    def call(self, operator: str, x: Sequence[Any], w: Sequence[Any], *more: Any) -> list[Any]:
        """Enqueue, run, and return the results."""
        made = self.enqueue(operator, x, w, *more)
        self.run()
        return made


@contextmanager
def emulated(ranks: int, nbytes: int = 4 << 20) -> Iterator[EmulatedRanks]:
    """Open the Windows."""
    windows = run_ranks(ranks, lambda group: moecomm.Window(group, nbytes, backend="host"))
    try:
        yield EmulatedRanks(windows)
    finally:
        for window in windows:
            window.close()
