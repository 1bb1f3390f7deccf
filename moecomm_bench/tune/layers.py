"""`moecomm tune layers`: the sizes from which on fused layers are faster than unfused ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moecomm.errors import Unsupported
from moecomm.gpu import tuning
from moecomm.gpu.tuning.layers import TOLERANCE, Bounds, Measured, of_measured
from moecomm.router import Model
from moecomm_bench import moe, results
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.tune import tables

# Forms of the layer in results of bench.moe: dtype of the weights, unfused, fused.
FORMS = (("bf16", moe.SEQUENTIAL, moe.FUSED), ("fp8", moe.FP8, f"{moe.FP8}, {moe.FUSED}"))


def tune(case: moe.ModelsCase, path: Path | None = None, measurements: Path | None = None) -> Path | None:
    """Measure layers in both forms on all ranks and write the table; see moecomm_bench.tune.rounds.tune.

    Args:
        case: models and tokens. Buffers are full, and nothing but our layers is measured.
        path: file of the table. Default: the file in which Buffers of this user look for it.
        measurements: file for the times, as JSON. Default: not written.

    Returns:
        The path of the table; None in a process that has nothing to report.

    Raises:
        BadInput: a value out of range, or a folder that cannot be created.
        Unsupported: CPU ranks.
        RanksFailed: at least one rank failed.
    """
    case = replace(case, peers=False, parts=False, fp8=True, room=0)
    case.check()
    if case.backend == "host":
        raise Unsupported("moecomm tune layers needs GPUs: CPU ranks have one form of the layer")
    tables.make_folder(path)
    by_rank = on_ranks("moecomm_bench.tune.layers:run_rank", asdict(case), case.ranks)
    if by_rank is None:
        return None
    gpu, result = by_rank[0]["gpu"], moe.merge(case, by_rank)
    if measurements is not None:
        results.write(measurements, {**result, "benchmark": "tune layers", "gpu": gpu})
    bounds = choose(case.ranks, case.models, result["rows"])
    return tables.store(gpu, tuning.Table(layers=tuple(bounds)), path)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Measure on one rank; returns what bench.moe returns, and the name of the GPU."""
    found = moe.run_rank(group, **job)
    return {**found, "gpu": tables.gpu_name(device_of(group, job["backend"]))}


def layers_of(ranks: int, models: list[Model], rows: list[dict[str, Any]]) -> dict[str, list[Measured]]:
    """Return by dtype the layers that were measured in both forms.

    Args:
        ranks: number of ranks.
        models: of the rows, by name.
        rows: of bench.moe, with `us` as percentiles or one number.
    """
    sizes = {model.name: model for model in models}
    us: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if (row["who"], row["what"]) == ("moecomm", "layer") and "us" in row:
            time = row["us"]["p50"] if isinstance(row["us"], dict) else row["us"]
            us[row["model"], row["tokens"], row["variant"]] = float(time)
    found: dict[str, list[Measured]] = {}
    for dtype, unfused, fused in FORMS:
        found[dtype] = []
        for (name, tokens, variant), time in us.items():
            if variant == unfused and (name, tokens, fused) in us:
                of_rank = tokens * sizes[name].topk
                of_expert = of_rank * ranks / sizes[name].num_experts
                found[dtype].append(Measured(of_expert, of_rank, time / us[name, tokens, fused]))
    return found


def choose(ranks: int, models: list[Model], rows: list[dict[str, Any]], tolerance: float = TOLERANCE) -> list[Bounds]:
    """Choose the bounds of each dtype that was measured; see layers_of and moecomm.gpu.tuning.layers.of_measured."""
    measured = layers_of(ranks, models, rows)
    return [of_measured(dtype, ranks, layers, tolerance) for dtype, layers in measured.items() if layers]
