"""Dispatch and combine between CPU ranks: moecomm's host backend against torch.distributed.all_to_all_single over gloo.

    python bench/host_vs_gloo.py [--tokens 512]

Both sides move the same rows, in two comparisons:

- `flat` against gloo with one row for each (token, rank): dispatch sends a token once to each rank that owns one of its
  experts; combine returns one row from each and adds in float32. Received rows and sums are compared bit for bit.
- `expert` and `batched` against gloo with one row for each (token, expert), which is what both layouts give to experts:
  topk rows of a token each way, weighted and added in float32. (gloo's rows do not arrive grouped by expert; grouping
  would cost it more.)

Combine takes the rows that arrived. They are in the window, like rows of Buffer.empty, and combine reads them in place.
`copied` is the same combine of rows outside the window, next to the same dispatch. gloo gets the splits and the gather
indices untimed. All variants alternate in one run. A time is that of the slowest rank, as the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cpu_ranks import keep, measure

import moecomm
from moecomm.router import random_routing
from moecomm_bench import exchange

LAYOUTS = ("flat", "expert", "batched")
AGAINST = {"flat": "gloo_by_rank", "expert": "gloo_by_expert", "batched": "gloo_by_expert"}
AGAINST |= {f"{layout}, copied": way for layout, way in AGAINST.items()}
WAYS = ("gloo_by_rank", "gloo_by_expert", *AGAINST)
Times = tuple[float, float]  # seconds of dispatch, of combine
WARMUP = 3


def run_rank(
    group: dist.ProcessGroup, tokens: int, hidden: int, experts: int, topk: int, rounds: int
) -> dict[str, Any]:
    """Run one rank; `times` holds seconds of (dispatch, combine) by variant and round."""
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    topk_idx, weights = random_routing(tokens, experts, topk, generator=generator)
    by_rank = exchange.TorchExchange(x, exchange.by_rank(topk_idx, experts, group.size()), None, group)
    by_expert = exchange.TorchExchange(x, exchange.by_expert(topk_idx, experts, group.size()), weights, group)

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        dist.barrier(group)
        begin = time.perf_counter()
        result = call()
        return result, time.perf_counter() - begin

    def turn(dispatch: Callable[[], Any], combine: Callable[[Any], torch.Tensor]) -> tuple[Any, torch.Tensor, Times]:
        arrived, dispatch_s = timed(dispatch)
        out, combine_s = timed(lambda: combine(arrived))
        return arrived, out, (dispatch_s, combine_s)

    times: dict[str, list[Times]] = {way: [] for way in WAYS}
    settings = {"hidden": hidden, "num_experts": experts, "topk": topk, "max_tokens": tokens}
    with moecomm.Buffer(group, **settings, backend="host") as buffer:
        for number in range(WARMUP + rounds):
            rows, sums, found = {}, {}, {}
            for way, gloo in (("gloo_by_rank", by_rank), ("gloo_by_expert", by_expert)):
                rows[way], sums[way], found[way] = turn(gloo.dispatch, gloo.combine)
            for way in LAYOUTS:
                rows[way], sums[way], found[way] = turn(
                    partial(buffer.dispatch, x, topk_idx, weights, layout=way),
                    lambda routed: buffer.combine(routed.x, routed.handle),
                )
                elsewhere = rows[way].x.clone()
                again, combine_s = timed(partial(buffer.combine, elsewhere, rows[way].handle))
                assert torch.equal(again, sums[way])
                found[f"{way}, copied"] = (found[way][0], combine_s)
            check(rows, sums)
            for way in WAYS:
                times[way] += [found[way]] * (number >= WARMUP)
    crossing = {"by_rank": by_rank, "by_expert": by_expert}
    return {"times": times} | {f"rows_{name}": len(gloo.token) for name, gloo in crossing.items()}


def check(rows: dict[str, Any], sums: dict[str, torch.Tensor]) -> None:
    """Check that both sides delivered the same rows and sums."""
    assert torch.equal(rows["flat"].x, rows["gloo_by_rank"]), "the two did not deliver the same rows"
    assert torch.equal(sums["flat"], sums["gloo_by_rank"]), "the two did not compute the same sums"
    assert torch.equal(sums["batched"], sums["expert"])
    # float32 sums in another order, then one rounding to bfloat16.
    apart = (sums["expert"].float() - sums["gloo_by_expert"].float()).abs()
    assert bool((apart <= 2**-7 * sums["expert"].float().abs() + 1e-5).all()), "the two did not compute the same sums"


def median_ms(by_rank: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the medians of the slowest rank of each round: dispatch, combine, and their sum."""
    rounds = zip(*(result["times"][name] for result in by_rank), strict=True)
    slowest = [[max(parts) for parts in zip(*ranks, strict=True)] for ranks in rounds]
    dispatch, combine = (statistics.median(part) * 1e3 for part in zip(*slowest, strict=True))
    return {
        "dispatch_ms": dispatch,
        "combine_ms": combine,
        "both_ms": statistics.median(sum(parts) * 1e3 for parts in slowest),
    }


def main() -> None:
    """Measure, print, and write bench/results/host_vs_gloo.json."""
    by_rank, case = measure("host_vs_gloo", __doc__ or "", model="deepseek-v3", ranks=4, tokens=512, rounds=15)
    found = {way: median_ms(by_rank, way) for way in WAYS}
    ratios = {way: found[gloo]["both_ms"] / found[way]["both_ms"] for way, gloo in AGAINST.items()}
    for way, medians in found.items():
        print(f"{way:<16}" + "  ".join(f"{key} {value:8.2f}" for key, value in medians.items()), end="  ")
        print(f"{ratios[way]:.2f} x {AGAINST[way]}" if way in ratios else "")
    rows = {key: sum(r[key] for r in by_rank) for key in ("rows_by_rank", "rows_by_expert")}
    keep("host_vs_gloo", {"case": case, **rows, "medians": found, "ratios": ratios})


if __name__ == "__main__":
    main()
