"""A fit of the terms of one GPU to measured operators of moecomm.overlap, with the error of each row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moecomm.errors import BadInput
from moecomm_bench.simulate.dlrm.cluster import Cluster
from moecomm_bench.simulate.dlrm.gpu import PARTS, Gpu, NcclAllToAll
from moecomm_bench.simulate.dlrm.operators import COPIED, MeasuredCase, read
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import Array
from moecomm_bench.simulate.solve import solve

_NOISE = 0.03  # relative standard deviation of a measured row around the model
GPU, RANKS = "NVIDIA H100 80GB HBM3", 2  # of the measured rows


@dataclass(frozen=True)
class _TermGroup:
    """A group of terms with expected values and the standard deviations of their logarithms, and its rows.

    `us` predicts a row's time by the terms; `measured` is that time, None where the row says nothing of them.
    """

    expected: tuple[float, ...]
    spread: tuple[float, ...]
    measured: Callable[[MeasuredCase], float | None]
    us: Callable[[Any, Any], float]


def _fused(row: MeasuredCase) -> float | None:
    return row.us["moecomm"] if row.lookups else None


def _torch(row: MeasuredCase) -> float | None:
    return row.us["alone"] if row.lookups else None


def _products(row: MeasuredCase) -> float | None:
    return row.us["alone"] if row.product else None


def _exchanged(row: MeasuredCase) -> float | None:
    """Return the time of NCCL's all-to-all, with torch's copy for an embedding."""
    if row.operator == "matmul_all_to_all":
        return row.nccl_us if row.product and row.product.experts == 1 else None
    return row.nccl_us if row.lookups else None


def _reduced(row: MeasuredCase) -> float | None:
    large = row.sent >= _LEAST_REDUCED
    return row.nccl_us if row.operator == "matmul_all_reduce" and large else None


def _cluster(**terms: Any) -> Cluster:
    """Return one domain of which only the named terms are known."""
    known: dict[str, Any] = {part: terms.get(part) for part in PARTS}
    return Cluster(Gpu("", **known), ModelNic(), 1, RANKS)


def _exchange_us(terms: NcclAllToAll, row: MeasuredCase) -> float:
    cluster = _cluster(all_to_all=terms)
    return cluster.all_to_all_us(row.sent) + (cluster.copy_us(row.sent) if row.lookups else 0.0)


_LEAST_REDUCED = 2 << 20  # bytes; smaller calls of NCCL take half the time of these
# Expected: data sheets, and a few microseconds for a launch.
_FIT: dict[str, _TermGroup] = {
    "bags": _TermGroup(
        (15.0, 2600.0, 0.01, 260.0),
        (0.7, 0.3, 1.5, 0.3),
        _fused,
        lambda terms, row: _cluster(bags=terms).fused_us(row.lookups),
    ),
    "torch_bags": _TermGroup(
        (10.0, 5.0, 2700.0, 1.4), (0.7, 0.7, 0.3, 0.7), _torch, lambda terms, row: terms.us(row.lookups)
    ),
    "products": _TermGroup(
        (3.0, 760.0, 2900.0, 0.9, 1000.0),
        (0.7, 0.3, 0.3, 0.1, 0.7),
        _products,
        lambda terms, row: terms.us(row.product),
    ),
    "all_to_all": _TermGroup((25.0, 290.0, 3000.0), (0.7, 0.3, 0.3), _exchanged, _exchange_us),
    "all_reduce": _TermGroup(
        (25.0, 290.0), (0.7, 0.3), _reduced, lambda terms, row: _cluster(all_reduce=terms).all_reduce_us(row.sent)
    ),
}


def fit(paths: Iterable[Path]) -> dict[str, Any]:
    """Return {gpu, ranks, fitted_to, left_out, terms, rows, errors}.

    A row's `error` is fitted / measured - 1; `held_out_error` is that of a fit without the row's case. `errors` has the
    median and worst of both for each group of terms.

    Args:
        paths: results of the benchmark. Cases of two ranks with 128 rows or more are used.
    """
    paths = list(paths)
    found, origins = read(paths, GPU, RANKS)
    if not found:
        raise BadInput("results", [str(path) for path in paths], f"JSON of moecomm bench overlap, {RANKS} x {GPU}")
    terms = {part: _fitted(part, found) for part in _FIT}
    rows = [row for part in _FIT for row in _rows(part, found, terms[part])]
    return {
        "gpu": GPU,
        "ranks": RANKS,
        "fitted_to": origins,
        "left_out": COPIED,
        "terms": {part: {name: round(value, 5) for name, value in asdict(one).items()} for part, one in terms.items()},
        "rows": rows,
        "errors": [_summary(part, [row for row in rows if row["terms"] == part]) for part in _FIT],
    }


def _fitted(part: str, found: list[MeasuredCase], without: tuple[str, str] | None = None) -> Any:
    """Return the terms of a part, fitted without a case: (case, dtype)."""
    how = _FIT[part]
    points = [(row, us) for row in found if (us := how.measured(row)) is not None and (row.case, row.dtype) != without]

    def errors(values: Array) -> Array:
        terms = PARTS[part](*map(float, values))
        return np.asarray([np.log(how.us(terms, row) / us) / _NOISE for row, us in points])

    return PARTS[part](*map(float, solve(errors, np.array(how.expected), np.array(how.spread))))


def _rows(part: str, found: list[MeasuredCase], terms: Any) -> Iterable[dict[str, Any]]:
    how = _FIT[part]
    for row in found:
        if (measured := how.measured(row)) is None:
            continue
        us, held_out_us = how.us(terms, row), how.us(_fitted(part, found, (row.case, row.dtype)), row)
        yield {
            "terms": part,
            "file": row.file,
            "operator": row.operator,
            "case": row.case,
            "dtype": row.dtype,
            "measured_us": round(measured, 3),
            "fitted_us": round(us, 3),
            "error": round(us / measured - 1, 4),
            "held_out_error": round(held_out_us / measured - 1, 4),
        }


def _summary(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"terms": part, "rows": len(rows)}
    for name in ("error", "held_out_error"):
        sizes = [abs(row[name]) for row in rows]
        found[name] = {"median": round(statistics.median(sizes), 4), "worst": round(max(sizes), 4)}
    return found


def write(path: Path, fitted: dict[str, Any]) -> None:
    """Write a fit as JSON."""
    path.write_text(json.dumps(fitted, indent=1) + "\n")
