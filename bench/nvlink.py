"""Whole dispatches and combines between GPUs, against the bytes that must cross NVLink.

    python bench/nvlink.py [--ranks 4] [--tokens 4096 128] [--sms 16 32] [--window vmm]

One process a GPU; routing of DeepSeek-V3's sizes, random ids.  A time is that of one operation inside a captured graph
of `--chain` of them, counts, flags and waits included, of the slowest rank, and the median over replays.  `remote` is
what crosses NVLink: each row once for each other rank that wants it; `of_320` is those bytes at 320 GB/s over the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measured import write

import moecomm
from moecomm.launch import launch
from moecomm.router import random_routing

WIRE = 320e9  # bytes a second out of each GPU


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """One rank: microseconds of every operation in every replay."""
    torch.cuda.set_device(group.rank())
    if job["window"]:
        os.environ["MOECOMM_WINDOW"] = job["window"]
    found: dict[str, Any] = {"rows": []}
    for tokens in job["tokens"]:
        with moecomm.Buffer(
            group, hidden=job["hidden"], num_experts=job["experts"], topk=job["topk"], max_tokens=tokens, backend="lsa"
        ) as buffer:
            found["backend"], found["nbytes"] = buffer.backend, buffer.nbytes
            for sms in job["sms"]:
                found["rows"] += measure(group, buffer, tokens, sms, job)
    return found


def measure(
    group: dist.ProcessGroup, buffer: moecomm.Buffer, tokens: int, sms: int, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """All layouts and payloads at one size."""
    g = torch.Generator(device="cuda").manual_seed(group.rank())
    x = torch.randn(tokens, job["hidden"], generator=g, device="cuda").bfloat16()
    cpu = torch.Generator().manual_seed(group.rank())
    idx, weights = (t.cuda() for t in random_routing(tokens, job["experts"], job["topk"], generator=cpu))
    owner = idx // (job["experts"] // group.size())
    remote = sum(int((owner == p).any(dim=1).sum()) for p in range(group.size()) if p != group.rank())
    hidden, rows = job["hidden"], []

    def add(what: str, layout: str, row_bytes: int, call: Callable[[], Any]) -> None:
        times = timed(group, call, job["chain"], job["replays"])
        buffer.check()
        rows.append(
            {
                "what": what,
                "layout": layout,
                "tokens": tokens,
                "sms": sms,
                "remote_bytes": remote * row_bytes,
                "us": times,
            }
        )

    for layout in ("flat", "expert"):
        routed = buffer.dispatch(x, idx, weights, layout=layout, num_sms=sms, sync=True)
        y, handle = routed.x.clone(), routed.handle
        del routed
        send = partial(buffer.dispatch, x, idx, weights, layout=layout, num_sms=sms)
        bring = partial(buffer.combine, y, handle, num_sms=sms)
        add("dispatch bf16", layout, 2 * hidden, send)
        add("dispatch fp8", layout, hidden + 4 * -(-hidden // 128), partial(send, quantize="fp8"))
        add("combine", layout, (2 if layout == "flat" else 4) * hidden, bring)
        if layout == "expert":
            add("combine bf16 wire", layout, 2 * hidden, partial(bring, wire=torch.bfloat16))
        del y, handle, bring
    return rows


def timed(group: dist.ProcessGroup, call: Callable[[], Any], chain: int, replays: int) -> list[float]:
    """Microseconds of one operation, by replay of a graph of `chain` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(chain):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays + 1):
        dist.barrier(group)
        call()  # ranks meet on the device before the clock starts
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / chain)
    return times[1:]


def main() -> None:
    """Runs, prints and writes bench/results/nvlink-<window>-<ranks>.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128])
    parser.add_argument("--sms", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--chain", type=int, default=20)
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--window", choices=["vmm", "nccl"])
    job = vars(parser.parse_args())
    ranks = job.pop("ranks")
    by_rank = launch("nvlink:run_rank", job, ranks)
    rows = []
    for parts in zip(*(r["rows"] for r in by_rank), strict=True):
        us = statistics.median(max(replay) for replay in zip(*(p["us"] for p in parts), strict=True))
        remote = statistics.mean(p["remote_bytes"] for p in parts)
        rows.append(
            {**parts[0], "remote_bytes": remote, "us": round(us, 2), "of_320": round(remote / WIRE * 1e6 / us, 3)}
        )
    for row in rows:
        gbs = row["remote_bytes"] / row["us"] / 1e3
        what = f"{row['tokens']:6d} tokens {row['sms']:4d} SMs  {row['what']:18s} {row['layout']:7s}"
        print(f"{what} {row['us']:9.1f} us {gbs:7.1f} GB/s  {row['of_320']:.2f} of 320")
    result = {
        "case": {**job, "ranks": ranks},
        "backend": by_rank[0]["backend"],
        "window_bytes": by_rank[0]["nbytes"],
        "rows": rows,
    }
    print(write(f"nvlink-{by_rank[0]['backend'].split('/')[1]}-{ranks}", result))


if __name__ == "__main__":
    main()
