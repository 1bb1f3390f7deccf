"""Dispatch and combine between CPU ranks: moecomm's host backend against torch.distributed.all_to_all_single over gloo.

    python bench/host_vs_gloo.py [--tokens 512]

Both move the same rows: a token once to each rank that owns one of its experts, and one row a (token, rank) home, where the rows of
a token are added in float32.  gloo is given what it can't know: how many rows go where, and which (not timed).  Received rows and
results are compared bit for bit.  The two take turns in one run; a time is that of the slowest rank, and the median over rounds.
moecomm's other layouts do more (a row a (token, expert), sums in float32 on the wire) and are timed beside them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from measured import write

import moecomm
from moecomm.launch import launch
from moecomm.router import MODELS, random_routing

WARMUP = 3
BLOCK = 16  # tokens summed at once: they stay in cache (measured: faster than index_add_ of whole tensors)


class Gloo:
    """The best that all_to_all_single allows: rows gathered once, exact splits, preallocated buffers, sums in cache."""

    def __init__(self, x: torch.Tensor, topk_idx: torch.Tensor, local_experts: int, group: dist.ProcessGroup) -> None:
        self.group, self.x = group, x
        owner = topk_idx // local_experts
        tokens = [(owner == rank).any(dim=1).nonzero().flatten() for rank in range(group.size())]
        self.token = torch.cat(tokens)
        self.sent = [len(t) for t in tokens]
        arriving = torch.empty(group.size(), dtype=torch.long)
        dist.all_to_all_single(arriving, torch.tensor(self.sent), group=group)
        self.arriving = arriving.tolist()
        rows, hidden = len(self.token), x.shape[1]
        self.outgoing = x.new_empty(rows, hidden)
        self.arrived = x.new_empty(sum(self.arriving), hidden)
        self.home = x.new_zeros(rows + 1, hidden)  # the last row is what a rank without the token adds
        self.row_of = torch.full((len(x), group.size()), rows)
        for rank, (first, at) in enumerate(zip(accumulate([0, *self.sent]), tokens, strict=False)):
            self.row_of[at, rank] = torch.arange(first, first + len(at))

    def dispatch(self) -> torch.Tensor:
        torch.index_select(self.x, 0, self.token, out=self.outgoing)
        self._exchange(self.arrived, self.outgoing, self.arriving, self.sent)
        return self.arrived

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        self._exchange(self.home[:-1], y, self.sent, self.arriving)
        out = torch.empty_like(self.x)
        for some, rows in zip(out.split(BLOCK), self.row_of.split(BLOCK), strict=True):
            parts = torch.index_select(self.home, 0, rows.flatten()).view(*rows.shape, -1)
            some.copy_(parts.sum(dim=1, dtype=torch.float32))
        return out

    def _exchange(self, out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], splits: list[int]) -> None:
        # As float32, because gloo does not know bfloat16 everywhere; bytes are bytes.
        dist.all_to_all_single(out.view(torch.float32), rows.view(torch.float32), out_splits, splits, group=self.group)


def run_rank(group: dist.ProcessGroup, tokens: int, hidden: int, experts: int, topk: int, rounds: int) -> dict[str, Any]:
    """One rank: seconds of (dispatch, combine) by round, for gloo and each layout of moecomm."""
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    topk_idx, weights = random_routing(tokens, experts, topk, generator=generator)
    gloo = Gloo(x, topk_idx, experts // group.size(), group)

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        dist.barrier(group)
        begin = time.perf_counter()
        result = call()
        return result, time.perf_counter() - begin

    times: dict[str, list[tuple[float, float]]] = {"gloo": [], "flat": [], "expert": [], "batched": []}
    with moecomm.Buffer(group, hidden=hidden, num_experts=experts, topk=topk, max_tokens=tokens, backend="host") as buffer:
        for round_ in range(WARMUP + rounds):
            arrived, gloo_dispatch = timed(gloo.dispatch)
            y = arrived * 0.5
            expected, gloo_combine = timed(lambda y=y: gloo.combine(y))
            found = {"gloo": (gloo_dispatch, gloo_combine)}
            for layout in ("flat", "expert", "batched"):
                routed, out = (lambda layout=layout: buffer.dispatch(x, topk_idx, weights, layout=layout)), None
                routed, dispatch_s = timed(routed)
                experts_out = y if layout == "flat" else routed.x
                out, combine_s = timed(lambda y=experts_out, handle=routed.handle: buffer.combine(y, handle))
                found[layout] = (dispatch_s, combine_s)
                if layout == "flat":
                    assert torch.equal(routed.x, arrived), "the two did not deliver the same rows"
                    assert torch.equal(out, expected), "the two did not compute the same sums"
            for name, pair in found.items():
                if round_ >= WARMUP:
                    times[name].append(pair)
    return {"times": times, "rows": len(gloo.token), "remote_rows": len(gloo.token) - gloo.sent[group.rank()]}


def median_ms(by_rank: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Of the slowest rank in each round: dispatch, combine, and the two together."""
    slowest = [[max(parts) for parts in zip(*ranks, strict=True)] for ranks in zip(*(r["times"][name] for r in by_rank), strict=True)]
    dispatch, combine = (statistics.median(part) * 1e3 for part in zip(*slowest, strict=True))
    return {"dispatch_ms": dispatch, "combine_ms": combine, "both_ms": statistics.median(sum(parts) * 1e3 for parts in slowest)}


def main() -> None:
    """Measures, prints, writes bench/results/host_vs_gloo.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    model = MODELS["deepseek-v3"]
    job = {"tokens": given.tokens, "hidden": model.hidden, "experts": model.num_experts, "topk": model.topk, "rounds": given.rounds}
    by_rank = launch("host_vs_gloo:run_rank", job, given.ranks)
    found = {name: median_ms(by_rank, name) for name in ("gloo", "flat", "expert", "batched")}
    for name, medians in found.items():
        medians["gloo_ratio"] = found["gloo"]["both_ms"] / medians["both_ms"]
        print(f"{name:<8}" + "  ".join(f"{key} {value:8.2f}" for key, value in medians.items()))
    case = {"ranks": given.ranks, "cores": len(os.sched_getaffinity(0)), "dtype": "bfloat16", **job}
    rows = {key: sum(r[key] for r in by_rank) for key in ("rows", "remote_rows")}
    print(write("host_vs_gloo", {"case": case, **rows, "medians": found}))


if __name__ == "__main__":
    main()
