"""A fit of the terms of rows that go direct between domains."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from moecomm_bench.simulate.direct import EXPECTED, TERMS, Crossing, DirectLine
from moecomm_bench.simulate.domain import Domain, Operation
from moecomm_bench.simulate.measured import MeasuredResult, Row, nic_of
from moecomm_bench.simulate.model import crossing
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import Array
from moecomm_bench.simulate.solve import solve

_NOISE = 0.03  # relative standard deviation of a measured row around the model
# Standard deviations of the terms' logarithms.  That of the overlap is small: only rows behind a NIC determine it.
_SPREAD_START, _SPREAD_ROW, _SPREAD_COPY, _SPREAD_OVERLAP = 0.2, 0.5, 0.5, 0.2
_OTHER_GPU_US, _SPREAD_OTHER_GPU = 5.0, 0.5


@dataclass(frozen=True)
class DirectPoint:
    """A dispatch or a combine of few tokens between domains, and its measured microseconds."""

    file: str
    machine: str
    operation: Operation
    payload: str
    tokens: int
    load: Crossing
    us: float


def direct_points(
    rows: Iterable[tuple[Row, MeasuredResult]], links: Mapping[tuple[str, str], tuple[float, float]], domain: Domain
) -> list[DirectPoint]:
    """Return the loads of rows that `domain` describes, if the NIC or link between their domains is known."""
    found = []
    for row, result in rows:
        (part,), nic = row.parts, nic_of(result, links, ModelNic())
        if nic is None:
            continue
        load = crossing(part.operation, result.spread, row.tokens, part.rows, nic, domain, part.load.blocks)
        found.append(DirectPoint(row.file, result.machine, part.operation, row.payload, row.tokens, load, row.us))
    return found


def fit_direct(points: list[DirectPoint], gpu: str) -> tuple[dict[Operation, DirectLine], float]:
    """Fit the lines of all operations together, by least squares of relative errors.

    Each operation has a start and a speed of copies. All dispatches share the terms of a row, and so do all combines.
    All operations share the overlap, and what they take longer on another GPU than `gpu`, whose lines these are.

    Returns:
        The lines, and the microseconds that a round takes longer on another GPU.
    """
    if not points:
        return {}, 0.0
    operations = sorted({point.operation.fitted_as for point in points}, key=astuple)
    kinds = sorted({one.what for one in operations})
    each, rows = len(operations), 2 * len(operations)
    start, row, block, copy, overlap = astuple(EXPECTED)

    def lines(terms: Array) -> dict[Operation, DirectLine]:
        found = {}
        for nth, operation in enumerate(operations):
            of_row = rows + 2 * kinds.index(operation.what)
            some = (terms[nth], terms[of_row], terms[of_row + 1], terms[each + nth], min(terms[-2], 1.0))
            found[operation] = DirectLine(*map(float, some))
        return found

    def errors(terms: Array) -> Array:
        now = lines(terms)
        ratios = [_predicted_us(point, now, gpu, terms[-1]) / point.us for point in points]
        return np.asarray(np.log(ratios) / _NOISE)

    expected = [start] * each + [copy] * each + [row, block] * len(kinds) + [overlap, _OTHER_GPU_US]
    spread = [_SPREAD_START] * each + [_SPREAD_COPY] * each + [_SPREAD_ROW] * (2 * len(kinds))
    found = solve(errors, np.array(expected), np.array([*spread, _SPREAD_OVERLAP, _SPREAD_OTHER_GPU]))
    return lines(found), float(found[-1])


def _predicted_us(point: DirectPoint, lines: dict[Operation, DirectLine], gpu: str, other_gpu_us: float) -> float:
    us = lines[point.operation.fitted_as].us(point.load)
    return us if point.machine == gpu else us + other_gpu_us


def written(points: list[DirectPoint], gpu: str) -> dict[str, Any]:
    """Fit, and return for its JSON: the lines with their errors, what another GPU adds, and the error of each row."""
    lines, other_gpu_us = fit_direct(points, gpu)
    rows = []
    for point in points:
        us = _predicted_us(point, lines, gpu, other_gpu_us)
        rows.append(
            {
                "file": point.file,
                **asdict(point.operation),
                "payload": point.payload,
                "tokens": point.tokens,
                "blocks": point.load.blocks,
                "measured_us": point.us,
                "fitted_us": round(us, 3),
                "error": round(us / point.us - 1, 4),
            }
        )
    direct = []
    for operation, line in lines.items():
        own = [abs(row["error"]) for row in rows if all(row[key] == value for key, value in asdict(operation).items())]
        terms = {term: round(getattr(line, term), 4) for term in TERMS}
        errors = {"rows": len(own), "median_error": round(statistics.median(own), 4), "worst_error": max(own)}
        direct.append({**asdict(operation), **terms, **errors})
    return {"direct": direct, "direct_other_gpu_us": round(other_gpu_us, 4), "direct_rows": rows}
