"""The time that verified rounds take between CPU ranks: python bench/verified.py [--tokens 256].

A Buffer that verifies no round, one that verifies each and one that verifies one of 100 alternate in one run, with the
same rows.  A time is that of a dispatch and its combine on the slowest rank: of the first two the median over rounds,
of the last the mean, because few of its rounds take long.  Rows of combine lie outside of the window.  --rounds is a
multiple of 50: two calls a round.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from cpu_ranks import keep, measure

import moecomm
from moecomm.router import random_routing

EVERY = (0, 1, 100)
WARMUP = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {"layout": "flat"},
    "expert": {"layout": "expert"},
    "expert, FP8": {"layout": "expert", "quantize": "fp8"},
}


def run_rank(
    group: dist.ProcessGroup, tokens: int, hidden: int, experts: int, topk: int, rounds: int
) -> dict[str, list[float]]:
    """Run one rank; seconds of each round, by layout and by how many rounds one is verified."""
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    topk_idx, weights = random_routing(tokens, experts, topk, generator=generator)
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": experts, "topk": topk, "max_tokens": tokens}
    buffers = {every: moecomm.Buffer(group, **sizes, backend="host", verify_every=every) for every in EVERY}
    times: dict[str, list[float]] = {}
    for name, how in LAYOUTS.items():
        for number in range(WARMUP + rounds):
            for every, buffer in buffers.items():
                dist.barrier(group)
                begin = time.perf_counter()
                routed = buffer.dispatch(x, topk_idx, weights, **how)
                dispatched = time.perf_counter()
                y = routed.x.float().to(torch.bfloat16)
                dist.barrier(group)
                middle = time.perf_counter()
                buffer.combine(y, routed.handle)
                seconds = dispatched - begin + time.perf_counter() - middle
                del routed
                times.setdefault(f"{name}/{every}", []).extend([seconds] * (number >= WARMUP))
    for buffer in buffers.values():
        buffer.close()
    return times


def main() -> None:
    """Measure, print, and write bench/results/verified-cpu.json."""
    by_rank, case = measure("verified", __doc__ or "", model="qwen3-30b-a3b", ranks=2, tokens=256, rounds=100)
    rows = []
    for name in LAYOUTS:
        row: dict[str, Any] = {"layout": name}
        for every in EVERY:
            slowest = [max(times) for times in zip(*(rank[f"{name}/{every}"] for rank in by_rank), strict=True)]
            middle = statistics.mean if every > 1 else statistics.median
            row[f"ms_every_{every}"] = round(middle(slowest) * 1e3, 3)
            if every > 1:
                unverified = [max(times) for times in zip(*(rank[f"{name}/0"] for rank in by_rank), strict=True)]
                row["ms_unverified_mean"] = round(statistics.mean(unverified) * 1e3, 3)
        print(row)
        rows.append(row)
    keep("verified-cpu", {"case": case, "rows": rows})


if __name__ == "__main__":
    main()
