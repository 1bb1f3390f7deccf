"""A halo exchange of your own over a moecomm.Window, as a Triton kernel: heat on a ring of cells that the ranks share.

torchrun --nproc-per-node 4 examples/window_halo_triton.py
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

HALO = tl.constexpr(32)  # cells, a line of memory on both sides of a field; one cell of each is used


@triton.jit
def heat(handle, cells, steps, block: tl.constexpr):  # noqa: ANN001, ANN201 (Triton's own types)
    """Two fields in turn.  A neighbor that has sent its cells of step n has read those of step n - 1."""
    rank, ranks = mt.rank_of(handle), mt.ranks_of(handle)
    left, right, field = (rank + ranks - 1) % ranks, (rank + 1) % ranks, cells + 2 * HALO
    mine = mt.local(handle).to(tl.pointer_type(tl.float32)) + HALO
    to_left = mt.peer(handle, left).to(tl.pointer_type(tl.float32)) + HALO
    to_right = mt.peer(handle, right).to(tl.pointer_type(tl.float32)) + HALO
    here = mt.barrier(handle, 0)  # all have written their first cells
    for step in range(steps):
        if here:
            now, then = step % 2 * field, (step + 1) % 2 * field
            tl.store(to_left + now + cells, tl.load(mine + now))  # my first cell is its right halo
            tl.store(to_right + now - 1, tl.load(mine + now + cells - 1))
            mt.signal(handle, left, 1, 1)
            mt.signal(handle, right, 0, 1)
            here = mt.wait(handle, 0, step + 1, left) & mt.wait(handle, 1, step + 1, right)
            for first in range(0, cells, block):
                cell = first + tl.arange(0, block)
                at, there = mine + now + cell, cell < cells
                sides = tl.load(at - 1, mask=there, volatile=True) + tl.load(at + 1, mask=there, volatile=True)
                tl.store(mine + then + cell, 0.25 * sides + 0.5 * tl.load(at, mask=there), mask=there)
            tl.debug_barrier()  # every thread of the program sees the new cells


def spread(ranks: Any, mine: torch.Tensor, steps: int, **options: Any) -> torch.Tensor:
    """Return this rank's cells after `steps` steps; `mine`: float32 `[cells]`, those of this rank at first."""
    halo, cells = HALO.value, len(mine)
    with moecomm.Window(ranks, 2 * (cells + 2 * halo) * 4, **options) as window:
        fields = window.tensor((2, cells + 2 * halo), torch.float32)[:, halo:-halo]
        fields[0].copy_(mine)
        heat[(1,)](mt.handle(window), cells, steps, 256)
        window.check()  # raises the error of a wait that failed
        return fields[steps % 2].clone()


if __name__ == "__main__":
    with group() as everybody:
        found = spread(everybody, torch.nn.functional.one_hot(torch.tensor(0), 256).float(), 100)
        print(f"{found.sum():.3f} in all, {found.max():.3f} in the warmest cell")
