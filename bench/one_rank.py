"""Rounds of one GPU with itself: the kernels' own work, without links to wait for.

    python bench/one_rank.py --json one-rank.json

Sizes are those of DeepSeek-V3 on 4 ranks: hidden 7168, top-8 of the 64 experts of a rank. A time is the median of 15
replays of a graph of 20 dispatches, or of 20 dispatches with their combines. To compare two commits, alternate between
them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import moecomm
from moecomm_bench.results import write

HIDDEN, EXPERTS, TOPK, TOGETHER, TIMES = 7168, 64, 8, 20, 15


def measure(tokens: int, layout: str) -> list[dict[str, Any]]:
    """Return rows with the microseconds of a dispatch, and of a dispatch with its combine."""
    rows = []
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": tokens}
    with moecomm.Buffer("self", **sizes, backend="lsa") as buffer:
        torch.manual_seed(0)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        idx = torch.rand(tokens, EXPERTS, device="cuda").argsort(dim=1)[:, :TOPK].contiguous()
        weights = torch.rand(tokens, TOPK, device="cuda")
        for both in (False, True):

            def rounds(both: bool = both) -> None:
                routed = buffer.dispatch(x, idx, weights, layout=layout, max_rows=tokens * TOPK, sync=False)
                if both:
                    buffer.combine(routed.x, routed.handle)

            rounds()  # compiles before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(TOGETHER):
                    rounds()
            graph.replay()
            found = statistics.median(time_of(graph) for _ in range(TIMES)) / TOGETHER
            buffer.check()
            what = "dispatch and combine" if both else "dispatch"
            rows.append({"tokens": tokens, "layout": layout, "what": what, "us": round(found, 3)})
    return rows


def time_of(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of a replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    measured = [row for tokens in (1, 128, 4096) for layout in ("expert", "flat") for row in measure(tokens, layout)]
    write(parser.parse_args().json, {"rows": measured})
