"""Complete expert layers: ours, torch's on the same input in the same run, and the GEMMs alone, alternating."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from moecomm.router import Model
from moecomm.tools.progress import progress
from moecomm_bench import replay
from moecomm_bench.clock import percentiles, rounded
from moecomm_bench.exchange import nccl_group
from moecomm_bench.layer_case import ModelsCase
from moecomm_bench.layers import BY_RANK, CHANNELS, DEFAULT_WIRE, FP8, FUSED, MXFP4, PACKED, SEQUENTIAL, Layers
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.singles import merge_about, open_singles

__all__ = [
    "BY_RANK",
    "DEFAULT_WIRE",
    "FP8",
    "FUSED",
    "MXFP4",
    "PACKED",
    "SEQUENTIAL",
    "ModelsCase",
    "merge",
    "run",
    "run_rank",
]

_TIMES = ("us", "alone_us", "eager_us")


def run(case: ModelsCase) -> dict[str, Any] | None:
    """Measure a case on all ranks; None in a process that has nothing to report.

    Returns {benchmark, case, backend, alone, rows}: see `merge`. Raises BadInput, RanksFailed.
    """
    case.check()
    by_rank = on_ranks("moecomm_bench.moe:run_rank", asdict(case), case.ranks)
    return None if by_rank is None else merge(case, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    case = ModelsCase(**{**job, "models": [Model(**model) for model in job["models"]]})
    device = device_of(group, case.backend)
    found: dict[str, Any] = {"rows": []}
    transport = nccl_group() if (case.peers or case.others) and device.type == "cuda" else group
    with ExitStack() as opened:
        singles, about = open_singles(opened, group, device, case.singles)
        found |= about
        step = opened.enter_context(progress(group, len(case.models) * len(case.tokens)))
        for model in case.models:
            weights = _weights(case, model, group.rank(), device)
            for tokens in case.tokens:
                step(f"{model.name or 'layer'}, {tokens} tokens")
                with Layers(case, model, tokens, weights, group, transport, device, singles) as layers:
                    found["backend"] = layers.buffer.backend
                    found["rows"] += layers.rows()
    return found


def _weights(case: ModelsCase, model: Model, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + rank)
    local, inner = model.num_experts // case.ranks, model.intermediate

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    w13 = drawn(local, 2 * inner, model.hidden)
    return {"w13": w13, "w2": drawn(local, model.hidden, inner)}


def merge(case: ModelsCase, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {model, tokens, who, what, variant, max_rows, window_bytes, opened_bytes, us: {p50, p90, p99}, host_us,
    tflops, of_gemms, of_torch}, or has `why` in place of figures. Variants are those of moecomm_bench.layers.

    - `max_rows`: rows that a dispatch makes room for: the Buffer's default, or with replayed routing exactly as many as
      arrive. Older results lack it: their dispatches made room for exactly the rows that arrived.
    - `window_bytes`, `opened_bytes`: window of a rank as a caller opens it, and that of the benchmark, which is larger.
      Older results have one of them, as `window_bytes`.
    - `us`: times of the slowest rank, in the mode of the case: a call of many in a row.
    - `alone_us`, `eager_us` (layers and GEMMs, if the case has single calls): see moecomm_bench.dispatch_combine.
    - `sustained_us` (layers and GEMMs, on GPUs): a call in a run without a pause, of the slowest rank.
    - `tflops`: per rank, on average.
    - `of_gemms`: time of a layer / time of our GEMMs alone, of the same weights.
    - `of_gemms_sustained`: the same ratio of sustained times.
    - `error` (layers, beside those of other libraries): see moecomm_bench.other_layers.error; the largest of a rank.
    - `of_torch`: torch's time for the same / this time, of the faster of torch's layers; for bfloat16 alone.
    """
    rows = [_merged(parts) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    for row in rows:
        _compare(row, rows)
    return {
        "benchmark": "moe",
        "case": replay.shown(case),
        "backend": by_rank[0]["backend"],
        **merge_about([found["alone"] for found in by_rank if "alone" in found]),
        "rows": rows,
    }


def _merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    if "why" in row:
        return row
    for name in filter(row.__contains__, _TIMES):
        row[name] = percentiles([part[name] for part in parts])
    if "error" in row:
        row["error"] = max(part["error"] for part in parts)
    if "sustained_us" in row:
        row["sustained_us"] = rounded(max(part["sustained_us"] for part in parts), 3)
    flops = statistics.mean(part["flops"] for part in parts)
    del row["flops"]
    row["tflops"] = rounded(flops / row["us"]["p50"] / 1e6, 2) if flops else None
    host = [part["host_us"] for part in parts if part["host_us"] is not None]
    return row | {"host_us": round(max(host), 2) if host else None}


def _compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add of_gemms, of_gemms_sustained and of_torch where the rows to compare with exist."""
    if "us" not in row or row["what"] not in ("layer", "GEMMs"):
        return
    alike = [r for r in rows if "us" in r and all(r[key] == row[key] for key in ("model", "tokens"))]
    quantized = next((name for name in (*CHANNELS, FP8, MXFP4, PACKED) if row["variant"].startswith(name)), "")
    about = ("moecomm", "GEMMs", quantized)
    gemms = next((r for r in alike if (r["who"], r["what"], r["variant"]) == about), None)
    if row["what"] == "layer" and gemms:
        row["of_gemms"] = rounded(row["us"]["p50"] / gemms["us"]["p50"], 4)
        if "sustained_us" in row and "sustained_us" in gemms:
            row["of_gemms_sustained"] = rounded(row["sustained_us"] / gemms["sustained_us"], 4)
    torchs = [r["us"]["p50"] for r in alike if (r["who"], r["what"]) == ("torch", row["what"])]
    if row["who"] != "torch" and torchs and not quantized:
        row["of_torch"] = rounded(min(torchs) / row["us"]["p50"], 4)
