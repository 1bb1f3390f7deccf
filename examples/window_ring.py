"""A ring all-gather of your own over a moecomm.Window.

One source, for GPUs through cuda.core and for CPU ranks through g++:

torchrun --nproc-per-node 4 examples/window_ring.py
"""

from __future__ import annotations

from typing import Any

import torch
from launched import group
from window_source import Compiled

import moecomm

SOURCE = r"""
#if defined(__CUDACC__)
#include <moecomm/window.cuh>
#define ENTRY extern "C" __global__ void
using Coop = moecomm::CoopBlock;
#else
#include <moecomm/window.h>
#define ENTRY extern "C" void
using Coop = moecomm::CoopThread;
#endif

// The row of rank r is at byte r * bytes of every rank's memory. In each step a rank passes on the row that came last.
// `before`: what signal 0 of this rank held before the call.
ENTRY ring(const moecomm::Window* handle, unsigned long long bytes, unsigned long long before) {
    const moecomm::Window window = *handle;
    const Coop coop;
    const int ranks = window.ranks, next = (window.rank + 1) % ranks, last = (window.rank + ranks - 1) % ranks;
    if (!window.barrier(coop)) return;  // all have read the rows of the call before
    for (int step = 0; step + 1 < ranks; ++step) {
        const unsigned long long row = (window.rank + ranks - step) % ranks * bytes;
        window.put_signal(coop, next, row, window.local<>(row), bytes, 0, 1);
        if (!window.wait(coop, 0, before + step + 1, last)) return;
    }
}
"""


class AllGather:
    """All-gather of rows of `columns` float32 numbers.  `rows`: `[ranks, columns]`, in the window."""

    def __init__(self, group: Any, columns: int, **options: Any) -> None:
        self.columns = columns
        self.window = moecomm.Window(group, 1 << 20, **options)
        self.rows = self.window.tensor((self.window.num_ranks, columns), torch.float32)
        self._ring = Compiled(SOURCE, "ring", self.window.device)
        self._calls = 0

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        """Write this rank's row, and return the rows of all ranks.  They are valid until the next call."""
        self.rows[self.window.rank].copy_(row)
        self._ring(self.window.handle_address, self.columns * 4, self._calls * (self.window.num_ranks - 1))
        self._calls += 1
        self.window.check()  # raises the error of a wait that failed
        return self.rows


def main(ranks: Any) -> torch.Tensor:
    """Gather twice; return the rows of the second call."""
    gather = AllGather(ranks, 1024)
    for call in range(2):
        rows = gather(torch.full((1024,), gather.window.rank + 10.0 * call, device=gather.window.device)).clone()
    gather.window.close()
    return rows


if __name__ == "__main__":
    with group() as everybody:
        print(main(everybody)[:, 0].tolist())
