"""A halo exchange of your own over a moecomm.Window: heat on a ring of cells that the ranks share.

One source, for GPUs through cuda.core and for CPU ranks through g++:

    torchrun --nproc-per-node 4 examples/window_halo.py
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

// Two fields of cells, used in turn, each with a halo of 32 cells (a line of memory) on both sides. Signal 0 counts
// left halos, signal 1 right ones. A neighbor that has sent the halos of step n has read those of step n - 1, so two
// fields are enough.
ENTRY heat(const moecomm::Window* handle, int cells, int steps) {
    const moecomm::Window window = *handle;
    const Coop coop;
    const int halo = 32, field = cells + 2 * halo, left = (window.rank + window.ranks - 1) % window.ranks;
    const int right = (window.rank + 1) % window.ranks;
    for (int step = 0; step < steps; ++step) {
        const int from = step % 2 * field, to = (step + 1) % 2 * field;
        const float* now = window.local<float>() + from + halo;
        float* next = window.local<float>() + to + halo;
        window.put_signal(coop, left, (from + halo + cells) * 4ull, now, 4, 1, 1);  // my first cell is its right halo
        window.put_signal(coop, right, (from + halo - 1) * 4ull, now + cells - 1, 4, 0, 1);
        if (!window.wait(coop, 0, step + 1, left) || !window.wait(coop, 1, step + 1, right)) return;
        for (int cell = coop.index(); cell < cells; cell += coop.size())
            next[cell] = 0.25f * now[cell - 1] + 0.5f * now[cell] + 0.25f * now[cell + 1];
        coop.sync();
    }
}
"""
HALO = 32


def spread(ranks: Any, mine: torch.Tensor, steps: int, **options: Any) -> torch.Tensor:
    """Return this rank's cells after `steps` steps; `mine`: float32 `[cells]`, those of this rank at first."""
    cells = len(mine)
    with moecomm.Window(ranks, 2 * (cells + 2 * HALO) * 4, **options) as window:
        fields = window.tensor((2, cells + 2 * HALO), torch.float32)[:, HALO:-HALO]
        fields[0].copy_(mine)
        window.barrier()
        Compiled(SOURCE, "heat", window.device)(window.handle_address, cells, steps)
        window.check()  # raises the error of a wait that failed
        return fields[steps % 2].clone()


def main(ranks: Any, cells: int = 256, steps: int = 100) -> torch.Tensor:
    """One hot cell on each rank."""
    return spread(ranks, torch.nn.functional.one_hot(torch.tensor(0), cells).float(), steps)


if __name__ == "__main__":
    with group() as everybody:
        found = main(everybody)
        print(f"{found.sum():.3f} in all, {found.max():.3f} in the warmest cell")
