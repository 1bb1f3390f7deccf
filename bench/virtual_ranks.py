"""Rounds of many virtual ranks on one GPU: the growth of a round's fixed work with the number of ranks.

    CUDA_DEVICE_MAX_CONNECTIONS=32 python bench/virtual_ranks.py --json virtual-ranks-h200.json

Every rank has two blocks, whatever the number of ranks, and one token, so that a block's work grows by agreement alone.
A time is that of the kernel of the rank that begins last: all other ranks have sent their headers and counts before.
It is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from moecomm.testing import LocalBuffers
from moecomm_bench.results import write

RANKS, HIDDEN, EXPERTS, TOPK, BLOCKS, ROUNDS = (4, 8, 16, 32, 64), 7168, 256, 8, 2, 21


def measure(ranks: int, tokens: int, layout: str) -> list[dict[str, Any]]:
    """Return rows with the microseconds of a dispatch and of a combine, and the window of a rank."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": tokens}
    torch.manual_seed(0)
    with LocalBuffers(ranks, **sizes, backend="lsa", device=0, timeout_s=5) as buffers:
        calls = [_call(tokens, layout) for _ in range(ranks)]

        def rounds() -> None:
            routed = buffers.dispatch(calls)
            buffers.combine([{"y": r.x, "handle": r.handle, "num_sms": BLOCKS} for r in routed])

        rounds()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(ROUNDS):
                rounds()
                torch.cuda.synchronize()
        buffers.check()
        window = buffers.buffers[0].nbytes
    spans = [e.time_range for e in seen.events() if e.name.startswith("moecomm_")]  # type: ignore[no-untyped-call]
    spans.sort(key=lambda span: span.start)
    assert len(spans) == 2 * ROUNDS * ranks
    last = [span.end - span.start for span in spans[ranks - 1 :: ranks]]
    sizes = {"ranks": ranks, "tokens": tokens, "layout": layout, "blocks": BLOCKS, "window_bytes": window}
    return [
        {**sizes, "what": what, "us": round(statistics.median(last[first::2]), 2)}
        for first, what in enumerate(("dispatch", "combine"))
    ]


def _call(tokens: int, layout: str) -> dict[str, Any]:
    return {
        "x": torch.randn(tokens, HIDDEN, device="cuda").bfloat16(),
        "topk_idx": torch.rand(tokens, EXPERTS, device="cuda").argsort(dim=1)[:, :TOPK].contiguous(),
        "topk_weights": torch.rand(tokens, TOPK, device="cuda"),
        "layout": layout,
        "num_sms": BLOCKS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        for tokens in (1, 8):
            for layout in ("expert", "flat"):
                rows += measure(ranks, tokens, layout)
        write(path, {"rows": rows})
