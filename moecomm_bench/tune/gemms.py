"""`moecomm tune gemms`: the fastest schedules of grouped GEMMs, by shape and rows of an expert, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moecomm.errors import BadInput
from moecomm.gpu import tuning
from moecomm.gpu.tuning.gemms import HEIGHTS, Rule, of_measured
from moecomm.router import Model
from moecomm.tools.progress import progress
from moecomm_bench import gemm, results
from moecomm_bench.ranks import need_gpu
from moecomm_bench.tune import tables

_MOST_ROWS = 1 << 20  # of all experts of a rank


@dataclass(frozen=True)
class Candidates:
    """The search space: every schedule of each dtype, for the GEMMs of models on so many ranks."""

    models: list[Model]
    ranks: list[int]  # that share the experts; one is measured
    rows: list[int]  # of an expert, on average
    dtypes: list[str]
    replays: int = 5
    tolerance: float = 0.02  # a schedule that is slower by at most this fraction may have a longer range of rows

    def gemms(self) -> list[gemm.Gemm]:
        """Return the GEMMs of a layer: the first with SwiGLU, and the second. Raises BadInput."""
        if not self.rows or min(self.rows) < 1 or self.replays < 1:
            raise BadInput("rows, replays", (self.rows, self.replays), "at least 1 each")
        found = gemm.gemms(self.models, self.ranks, self.dtypes)
        if (most := max(self.rows) * max(case.experts for case in found)) > _MOST_ROWS:
            raise BadInput("rows", max(self.rows), f"fewer: all experts of a rank have {most}, at most {_MOST_ROWS}")
        return [case for case in found if (case.gemm == 1) == (case.activation is not None)]

    def tokens(self, case: gemm.Gemm) -> list[int]:
        """Return the tokens of a rank for which the experts of a GEMM have about `rows` rows, without repetitions."""
        experts = case.experts * case.ranks
        return sorted({max(1, round(rows * experts / case.topk / case.ranks)) for rows in self.rows})


def tune(candidates: Candidates, path: Path | None = None, measurements: Path | None = None) -> Path:
    """Measure on the current GPU and write the table; see moecomm_bench.tune.rounds.tune.

    Raises:
        BadInput: a candidate is out of range, or the folder cannot be created.
        Unsupported: there is no GPU.
    """
    cases = candidates.gemms()
    need_gpu("tune gemms", "schedules are those of GPU kernels")
    tables.make_folder(path)
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure(candidates, cases, device)
    gpu = tables.gpu_name(device)
    if measurements is not None:
        results.write(measurements, {"benchmark": "tune gemms", "gpu": gpu, "rows": rows})
    return tables.store(gpu, tuning.Table(gemms=tuple(choose(rows, candidates.tolerance))), path)


def measure(candidates: Candidates, cases: list[gemm.Gemm], device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of bench.gemm with the times of all schedules, for each GEMM and number of tokens."""
    found = []
    with progress(None, len(cases)) as step:
        for case in cases:
            step(f"{case.model} GEMM {case.gemm}, {case.dtype}, {case.ranks} ranks")
            tokens = candidates.tokens(case)
            found += gemm.schedules_of(case, tokens, device, candidates.replays)
    return found


def choose(measured: list[dict[str, Any]], tolerance: float) -> list[Rule]:
    """Choose the rules of all shapes that were measured.

    Args:
        measured: rows of bench.gemm: dtype, columns, depth, experts, rows (of all experts), and `us` by schedule.
        tolerance: see Candidates.
    """
    by_shape: dict[tuple[str, int, int, int], list[tuple[int, dict[str, float]]]] = {}
    for row in measured:
        shape = row["dtype"], row["columns"], row["depth"], row["experts"]
        us = {name: float(time) for name, time in row["us"].items() if name in HEIGHTS[row["dtype"]]}
        by_shape.setdefault(shape, []).append((row["rows"] // row["experts"], us))
    found = []
    for (dtype, columns, depth, groups), us_of in sorted(by_shape.items()):
        found += of_measured(dtype, columns, depth, groups, us_of, tolerance)
    return found
