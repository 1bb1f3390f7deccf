"""A timing of dispatch and combine: torchrun --nproc-per-node 4 examples/microbenchmark.py"""

from __future__ import annotations

import time
from typing import Any

import torch
from launched import group

import moecomm


def median_us(ranks: Any, tokens: int = 128, hidden: int = 7168, experts: int = 256, topk: int = 8) -> float:
    """Return the median microseconds of a dispatch and its combine on this rank, as the host sees them.

    `moecomm bench` also replays graphs.
    """
    with moecomm.Buffer(ranks, hidden=hidden, num_experts=experts, topk=topk, max_tokens=tokens) as buffer:
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=buffer.device)
        topk_idx = torch.rand(tokens, experts, device=buffer.device).topk(topk).indices
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            routed = buffer.dispatch(x, topk_idx, layout="flat")
            buffer.combine(routed.x, routed.handle)
            buffer.check()  # waits for the device
            times.append((time.perf_counter() - begin) * 1e6)
        return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    with group() as ranks:
        print(f"dispatch and combine: {median_us(ranks):.0f} us")
