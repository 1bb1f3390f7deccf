"""The time that verified rounds take between CPU ranks: python bench/verified.py [--tokens 256].

A Buffer that verifies no round, one that verifies each and one that verifies one of 100 alternate in one run, with the
same rows.  A time is that of a dispatch and its combine on the slowest rank: of the first two the median over rounds,
of the last the mean, because few of its rounds take long.  Rows of combine lie outside of the window.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moecomm
from moecomm.bench.results import write
from moecomm.router import MODELS, random_routing
from moecomm.tools.launch import launch

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank")
    parser.add_argument("--rounds", type=int, default=100, help="a multiple of 50: two calls a round")
    given = parser.parse_args()
    model = MODELS["qwen3-30b-a3b"]
    job = {
        "tokens": given.tokens,
        "hidden": model.hidden,
        "experts": model.num_experts,
        "topk": model.topk,
        "rounds": given.rounds,
    }
    by_rank = launch("verified:run_rank", job, given.ranks)
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
    path = Path(__file__).parent / "results" / "verified-cpu.json"
    print(write(path, {"case": {"ranks": given.ranks, "dtype": "bfloat16", **job}, "rows": rows}))


if __name__ == "__main__":
    main()
