"""python -m tests.emulator.instructions [--json FILE]: work of a block of a round of few tokens, by number of ranks.

Kernels are compiled by g++, which counts the basic blocks that each thread runs; a basic block has some ten
instructions.  A wait counts as one poll in vain at most.  Every rank has one token, so that work grows by what ranks
tell each other alone: the counts of R ranks in E + R columns.  Up to 16 ranks every block reads all of them, beyond its
share and the sums of the others' (`words`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm_bench import results

from .machine import Arguments, Machine

RANKS, LAYOUTS, BLOCKS = (8, 16, 32, 64), ("flat", "expert"), (1, 4, 32)
HIDDEN, EXPERTS, TOPK = 64, 256, 8
SHARED_ABOVE = 16  # ranks: shares_columns of csrc/protocol/layout.h


def words(ranks: int, blocks: int) -> float:
    """Return the counts and sums that a block reads, on average; those of its own experts, read by each, apart."""
    columns = EXPERTS + ranks
    return ranks * columns if ranks <= SHARED_ABOVE else ranks * columns / blocks + 2 * columns


def measure(machine: Machine, ranks: int, layout: str) -> dict[str, tuple[int, int]]:
    """Return the most steps of a thread, and of all threads of a block, of any rank, by operation."""
    found: list[tuple[int, int]] = []

    def run_all(args: list[Arguments]) -> None:
        machine.run_all(args)
        found.append(tuple(max(each) for each in zip(*map(machine.steps, range(ranks)), strict=True)))  # type: ignore[arg-type]

    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": 1}
    generator = torch.Generator().manual_seed(0)
    through = patch.object(local, "_native", SimpleNamespace(host_run_all=run_all))
    with through, LocalBuffers(ranks, **sizes, backend="host") as buffers:
        calls = [_call(generator, layout) for _ in range(ranks)]
        routed = buffers.dispatch(calls)
        sums = buffers.combine([{"y": here.x, "handle": here.handle} for here in routed])
        buffers.check()
    assert all(bool(out.isfinite().all()) for out in sums)
    return dict(zip(("dispatch", "combine"), found, strict=True))


def _call(generator: torch.Generator, layout: str) -> dict[str, Any]:
    return {
        "x": torch.randn(1, HIDDEN, generator=generator).bfloat16(),
        "topk_idx": torch.rand(1, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK],
        "topk_weights": torch.rand(1, TOPK, generator=generator),
        "layout": layout,
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.emulator.instructions", description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for blocks in BLOCKS:
        machine = Machine(blocks, counted=True)
        for layout in LAYOUTS:
            for ranks in RANKS:
                for what, (thread, block) in measure(machine, ranks, layout).items():
                    about = {"ranks": ranks, "layout": layout, "what": what, "blocks": blocks}
                    rows.append({**about, "of_a_thread": thread, "of_a_block": block})
                    print(json.dumps(rows[-1]), flush=True)
    if given.json:
        results.write(given.json, {"case": {"experts": EXPERTS, "topk": TOPK, "tokens": 1}, "rows": rows})


if __name__ == "__main__":
    main()
