"""A ring all-gather of your own over a moecomm.Window, as a Triton kernel.

torchrun --nproc-per-node 4 examples/window_ring_triton.py
"""

from __future__ import annotations

from typing import Any

import torch
from launched import group, installed_by

import moecomm

with installed_by("pip install triton"):
    import triton
    import triton.language as tl

    import moecomm.triton as mt


@triton.jit
def ring(handle, columns, before, block: tl.constexpr):  # noqa: ANN001, ANN201 (Triton's own types)
    """Gather rows of float32: that of rank r begins at column r * columns.  `before`: what signal 0 held before."""
    rank, ranks = mt.rank_of(handle), mt.ranks_of(handle)
    following, last = (rank + 1) % ranks, (rank + ranks - 1) % ranks
    mine = mt.local(handle).to(tl.pointer_type(tl.float32))
    theirs = mt.peer(handle, following).to(tl.pointer_type(tl.float32))
    here = mt.barrier(handle, 0)  # all have read the rows of the call before
    for step in range(ranks - 1):
        if here:
            row = (rank + ranks - step) % ranks * columns
            for first in range(0, columns, block):
                column = first + tl.arange(0, block)
                there = column < columns
                tl.store(theirs + row + column, tl.load(mine + row + column, mask=there, volatile=True), mask=there)
            mt.signal(handle, following, 0, 1)
            here = mt.wait(handle, 0, before + step + 1, last)


class AllGather:
    """All-gather of rows of `columns` float32 numbers.  `rows`: `[ranks, columns]`, in the window."""

    def __init__(self, group: Any, columns: int, **options: Any) -> None:
        self.window = moecomm.Window(group, 1 << 20, **options)
        self.rows = self.window.tensor((self.window.num_ranks, columns), torch.float32)
        self._handle, self._calls = mt.handle(self.window), 0

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        """Write this rank's row, and return the rows of all ranks.  They are valid until the next call."""
        self.rows[self.window.rank].copy_(row)
        ring[(1,)](self._handle, len(row), self._calls * (self.window.num_ranks - 1), 1024)
        self._calls += 1
        self.window.check()  # raises the error of a wait that failed
        return self.rows


if __name__ == "__main__":
    with group() as everybody:
        gather = AllGather(everybody, 1000)
        print(gather(torch.full((1000,), gather.window.rank + 1.0, device=gather.window.device))[:, 0].tolist())
        gather.window.close()
