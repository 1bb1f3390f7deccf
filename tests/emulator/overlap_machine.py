"""Ranks of fused operators over Windows of CPU ranks, whose kernels run in the emulator, all at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import moecomm
from moecomm.overlap.gpu import GpuExecutor
from tests.backends.conftest import run_ranks

from .gemm_machine import compiled
from .machine import LIMIT, Launch
from .units import scheduler

BLOCKS = 2  # of a launch


class EmulatedRanks:
    """GpuExecutors of all ranks.  call() makes the same call on each, and runs what they launch together."""

    def __init__(self, windows: list[moecomm.Window]) -> None:
        self.windows = windows
        self.executors = [GpuExecutor(window) for window in windows]
        self.seed = 0
        self._launches: list[tuple[Any, ctypes.Structure]] = []
        for executor in self.executors:
            executor._units = BLOCKS
            executor._launch = lambda kernel, blocks, args: self._launches.append((kernel, args))  # type: ignore

    def call(self, operator: str, x: Sequence[Any], w: Sequence[Any], *more: Any) -> list[Any]:
        """Call an operator with the tensors of each rank, and return the results by rank.

        With tensors of fewer ranks, the others do not come.
        """
        calls = [getattr(executor, operator) for executor in self.executors]
        made = [call(*mine, *more) for call, mine in zip(calls, zip(x, w, strict=True), strict=False)]
        given, self._launches = self._launches, []
        self.seed += 1
        launches = (Launch * len(given))(
            *(
                Launch(
                    ctypes.cast(compiled(kernel).kernel, ctypes.c_void_p).value,
                    ctypes.addressof(args),
                    BLOCKS,
                    kernel.threads,
                    kernel.shared_bytes,
                    -1,
                )
                for kernel, args in given
            )
        )
        ended = scheduler().emulator_run(ctypes.addressof(launches), len(given), 10 * LIMIT, self.seed)
        assert ended == 0, "a kernel does not end"
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
