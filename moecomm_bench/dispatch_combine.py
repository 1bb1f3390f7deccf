"""Complete dispatches and combines, as a caller sees them, against the bytes that must cross the wire."""

from __future__ import annotations

import itertools
import statistics
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from moecomm.tools.progress import Step, progress
from moecomm_bench import beside, ceiling, overlap, replay
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import percentiles, rounded
from moecomm_bench.ours import OUTSIDE, Ours, TimedOperation, operations
from moecomm_bench.peers import OtherLibraries
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.singles import merge_about, open_singles

TIMES = ("us", "alone_us", "eager_us")


def run(case: RoundsCase, limit_s: float = float("inf")) -> dict[str, Any] | None:
    """Measure a case on all ranks; None in a process that has nothing to report. `limit_s`: see on_ranks.

    Returns {benchmark, case, backend, libraries, ceiling, ceiling_is, alone, memory, rows}: see `merge`.
    Raises BadInput, RanksFailed.
    """
    case.check()
    by_rank = on_ranks("moecomm_bench.dispatch_combine:run_rank", asdict(case), case.ranks, limit_s)
    return None if by_rank is None else merge(case, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    case = RoundsCase(**job)
    device = device_of(group, case.backend)
    found: dict[str, Any] = {"ceiling": [], "memory": [], "rows": []}
    with ExitStack() as opened:
        singles, about = open_singles(opened, group, device, case.singles)
        found |= about
        peers = OtherLibraries(case, group, device, singles) if case.peers else None
        found["libraries"] = peers.versions if peers else {}
        at_a_size = len(operations(case)) + (peers.count if peers else 0)
        raw = ceiling.ways_count(case.backend, torch.get_num_threads()) if case.ceiling and group.size() > 1 else 0
        step = opened.enter_context(progress(group, raw + len(case.tokens) * at_a_size))
        if case.ceiling:
            found["ceiling"] = ceiling.measure(group, case.backend, device, step)
        for tokens, layout in itertools.product(case.tokens, case.layouts):
            # A Buffer for each layout: graphs of another would keep room in its window.
            with Ours(of_layout := replace(case, layouts=[layout]), group, device, tokens, singles) as ours:
                found["backend"] = ours.buffer.backend
                found["memory"].append(ours.memory())
                found["rows"] += _rows(of_layout, group, ours, step)
                if peers and layout == case.layouts[-1]:
                    found["rows"] += peers.rows(ours, step)
    return found


def _rows(case: RoundsCase, group: dist.ProcessGroup, ours: Ours, step: Step) -> list[dict[str, Any]]:
    found = []
    for op in operations(case):
        step(f"{ours.tokens} tokens: {op.label}")
        row = ours.row(op)
        if case.overlap_gemm and op.what != "pair" and "us" in row:
            row["overlap"] = _beside(group, ours, op, row)
            if op.what == "dispatch" and ours.buffer.device.type == "cuda":
                row["halves"] = ours.halves(op, statistics.median(row["us"]))
        found.append(row)
    return found


def _beside(group: dist.ProcessGroup, ours: Ours, op: TimedOperation, row: dict[str, Any]) -> dict[str, Any]:
    if ours.buffer.device.type != "cuda":
        return {"why": "on GPUs only"}
    return overlap.measure(group, ours.call(op), row["sms"], statistics.median(row["us"]))


def merge(case: RoundsCase, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {who, what, layout, payload, variant, tokens, sms_asked, sms, us: {p50, p90, p99}, host_us,
    host_us_slowest, wire_bytes, busiest_bytes, logical_bytes, wire_gbs, logical_gbs, of_wire}, or has `why` in place of
    figures. Bytes are means over ranks and inputs.

    `libraries` has the versions of other libraries, if there are any beside torch's.

    - `us`: times of the slowest rank, in the mode of the case: an operation of many in a row.
    - `alone_us`, `eager_us` (if the case has single calls): {p50, p90, p99} of single calls (moecomm_bench.singles),
      and of operations that the host enqueues one by one, where `us` has those of a graph. `alone` of the result is
      {calls, floor_us, step_ns}: see Singles.about; or {why} where ranks cannot start together.
    - `host_us`, `host_us_slowest`: medians of a rank, for the median rank and for the slowest.
    - `wire_bytes`: bytes that have to leave a rank, counted alike for every library: RoundsCase.wire_bytes.
    - `moved_bytes`: bytes that a library sends, with rows for each expert and wider sums. Of moecomm those that it
      stores at other ranks: also metadata and, where few tokens travel in packets, tags and padding.
    - `ideal_bytes` (moecomm only): those of `moved_bytes` that are rows and scales.
    - `inside_bytes`, `across_bytes` and their GB/s (moecomm only): those that stay in a domain, those that leave it.
    - `straight` (moecomm only): true if rows go to other domains without forwarders.
    - `of_wire`: wire time at the ceiling / p50; with skewed or replayed routing, wire time is that of the busiest link.
      If one is above 1, the fastest all-to-all that was found is no ceiling: `ceiling_is` then is "reference".
    - `of_sum` (pairs): time / sum of the times of its two parts alone.
    - `of_flat`: time / time of the same operation on flat rows.
    - `overlap`, `halves`: times with a concurrent matmul, see moecomm_bench.overlap; `halves` is in microseconds.
    """
    limits = ceiling.merge([found["ceiling"] for found in by_rank])
    gbs = limits[0]["gbs"] if limits else None
    rows = [_merged(case, parts, gbs) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    for row in rows:
        _compare(row, rows)
    memory = [
        {key: part if key == "layout" else max(other[key] for other in parts) for key, part in parts[0].items()}
        for parts in zip(*(found["memory"] for found in by_rank), strict=True)
    ]
    return {
        "benchmark": "dispatch-combine",
        "case": replay.shown(case),
        "backend": by_rank[0]["backend"],
        **({"libraries": known} if (known := by_rank[0].get("libraries")) else {}),
        "ceiling": limits,
        "ceiling_is": beside.ceiling_is(rows),
        **merge_about([found["alone"] for found in by_rank if "alone" in found]),
        "memory": memory,
        "rows": rows,
    }


def _merged(case: RoundsCase, parts: tuple[dict[str, Any], ...], ceiling_gbs: float | None) -> dict[str, Any]:
    row = dict(parts[0])
    whys = [part["why"] for part in parts if "why" in part]
    if whys:
        return {key: value for key, value in row.items() if key not in (*TIMES, "host_us")} | {"why": whys[0]}
    for name in filter(row.__contains__, TIMES):
        row[name] = percentiles([part[name] for part in parts])
    us = row["us"]
    host = [part["host_us"] for part in parts if part["host_us"] is not None]
    row["host_us"] = round(statistics.median(host), 2) if host else None
    row["host_us_slowest"] = round(max(host), 2) if host else None
    for part in ("wire", "moved", "inside", "across", "logical"):
        if f"{part}_bytes" in row:
            row[f"{part}_gbs"] = rounded(row[f"{part}_bytes"] / us["p50"] / 1e3, 3)
    row["of_wire"] = None
    if ceiling_gbs:
        moved = row["busiest_bytes"] if case.skew or case.routing_file else row["wire_bytes"]
        row["of_wire"] = rounded(moved / ceiling_gbs / 1e3 / us["p50"], 4)
    if "overlap" in row and "why" not in row["overlap"]:
        kept, held = (min(part["overlap"][name] for part in parts) for name in ("kept", "held"))
        alone = min(part["overlap"]["gemm_tflops"] for part in parts)
        row["overlap"] = {"gemm_tflops": rounded(alone, 1), "kept": rounded(kept, 4), "held": rounded(held, 4)}
    if "halves" in row:
        row["halves"] = {name: percentiles([part["halves"][name] for part in parts])["p50"] for name in row["halves"]}
    return row


def _compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add of_sum and of_flat where the rows to compare with exist."""
    if row["who"] != "moecomm" or "us" not in row:
        return
    if row["what"] == "pair":
        alone = [
            _p50(rows, row, what="dispatch", variant=""),
            _p50(rows, row, what="combine", payload=""),
        ]
        if None not in alone:
            row["of_sum"] = rounded(row["us"]["p50"] / sum(filter(None, alone)), 4)
    elif row["layout"] != "flat":
        flat = _p50(rows, row, layout="flat", variant=OUTSIDE if row["what"] == "combine" else "")
        if flat:
            row["of_flat"] = rounded(row["us"]["p50"] / flat, 4)


def _p50(rows: list[dict[str, Any]], like: dict[str, Any], **other: str) -> float | None:
    """Return the p50 of moecomm's row that equals `like` except for `other`; None if there is none."""
    keys = ("who", "what", "layout", "payload", "variant", "tokens", "sms_asked")
    wanted = {key: other.get(key, like[key]) for key in keys}
    found = [row["us"]["p50"] for row in rows if "us" in row and all(row[key] == wanted[key] for key in keys)]
    return float(found[0]) if found else None
