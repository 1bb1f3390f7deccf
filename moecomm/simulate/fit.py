"""A fit of the lines of one domain to results of the benchmark, with the error of each row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from moecomm.errors import BadInput
from moecomm.simulate.domain import FEW, MANY, MOST_FEW, Key, Line, Load, Operation
from moecomm.simulate.measured import Row, read, rows_of
from moecomm.simulate.routing import Array

_ALPHA, _BYTE, _ROW = range(3)


@dataclass(frozen=True)
class Point:
    """A load and its measured microseconds."""

    load: Load
    us: float


@dataclass(frozen=True)
class Fitted:
    """A line. `borrowed` names the terms that its points cannot determine: from the line of `flat`, or left at 0."""

    line: Line
    borrowed: tuple[str, ...]


def fit_line(points: list[Point], regime: str, flat: Line | None = None) -> Fitted:
    """Fit a line by least squares of relative errors, with no term below 0.

    The floor exists for few tokens only. It is the constant of the points with the fewest bytes, as many points as fit
    best. Where the points cannot separate the terms, alpha_us and gbs come from the `flat` line if there is one;
    otherwise rows cost 0.
    """
    if not points:
        raise BadInput("points", 0, "at least one row")
    ordered = sorted(points, key=lambda point: point.load.sent)
    found = [_with_floor(ordered, low, flat) for low in range(max(1, len(ordered) - 2) if regime == FEW else 1)]
    return min(found, key=lambda one: _squares(one.line, points))


def _with_floor(ordered: list[Point], low: int, flat: Line | None) -> Fitted:
    floor = _constant(ordered[:low]) if low else 0.0
    return _linear(ordered[low:], flat, floor)


def _constant(points: list[Point]) -> float:
    """Return the constant with the least squares of relative errors."""
    return sum(1 / p.us for p in points) / sum(1 / p.us**2 for p in points)


def _squares(line: Line, points: Iterable[Point]) -> float:
    return sum((line.us(point.load) / point.us - 1) ** 2 for point in points)


def _linear(points: list[Point], flat: Line | None, floor: float) -> Fitted:
    terms = np.array([[1.0, p.load.sent / 1e3, p.load.rows / 1e3] for p in points])
    us = np.array([p.us for p in points])
    known = np.array([0.0, 0.0, 0.0] if flat is None else [flat.alpha_us, 1 / flat.gbs, 0.0])
    fixed = _to_fix(terms / us[:, None], flat is not None)
    free = [term for term in range(3) if term not in fixed]
    left = us - terms[:, fixed] @ known[fixed]
    value = known.copy()
    value[free] = _not_negative(terms[:, free] / us[:, None], left / us)
    line = Line(floor, float(value[_ALPHA]), float(1 / max(value[_BYTE], 1e-9)), float(value[_ROW]))
    return Fitted(line, tuple(("alpha_us", "gbs", "row_ns")[term] for term in fixed))


def _to_fix(terms: Array, borrow: bool) -> list[int]:
    """Return the fewest terms to fix so that the points determine the rest."""
    candidates = [(_ALPHA,), (_BYTE,), (_ALPHA, _BYTE)] if borrow else [(_ROW,), (_ALPHA, _ROW)]
    scaled = terms / np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    for fixed in [(), *candidates]:
        free = [term for term in range(3) if term not in fixed]
        if np.linalg.matrix_rank(scaled[:, free], tol=1e-3) == len(free):
            return list(fixed)
    return list(candidates[-1])


def _not_negative(terms: Array, values: Array) -> Array:
    """Solve least squares with no term below 0, by trying all subsets of the (at most three) terms."""
    best, least = np.zeros(terms.shape[1]), float(values @ values)
    for size in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), size):
            part = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            squares = float(np.sum((terms[:, chosen] @ part - values) ** 2))
            if (part >= 0).all() and squares < least - 1e-12:
                best, least = np.zeros(terms.shape[1]), squares
                best[list(chosen)] = part
    return best


def fit(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the content of `moecomm simulate fit`: lines, the results they were fitted to, and the error of each row.

    The fit uses moecomm's own dispatches and combines on GPUs of one domain, with the tuning table's blocks, chained,
    in graphs, without skew. Pairs, other block counts and skewed routing remain for the check.
    """
    results = [result for path in paths for result in read(path)]
    rows = [row for result in results for row in rows_of(result) if row.fits]
    if not rows:
        raise BadInput("results", [str(path) for path in paths], "JSON of moecomm bench dispatch-combine or sweep")
    lines = dict(_lines(rows))
    overlaps = [overlap for result in results for overlap in result.overlaps()]
    errors = [_error(row, lines) for row in rows]
    used = [result for result in results if result.overlaps() or any(row.fits for row in rows_of(result))]
    return {
        "domain": results[0].machine,
        "ranks": sorted({result.ranks for result in used}),
        "fitted_to": [{"file": r.path.name, "date": r.found["date"], "sha256": r.sha256} for r in used],
        "gemm": _gemm(overlaps),
        "lines": [_written(key, fitted, errors) for key, fitted in lines.items()],
        "rows": errors,
    }


def _lines(rows: list[Row]) -> Iterator[tuple[Key, Fitted]]:
    flat: dict[tuple[str, str], Line] = {}
    of_key: dict[Key, list[Point]] = {}
    for row in rows:
        (part,) = row.parts
        of_key.setdefault((part.operation, _regime(row)), []).append(Point(part.load, row.us))
    # flat first, because the other layouts borrow from its lines.
    for operation, regime in sorted(of_key, key=lambda k: (k[0].layout != "flat", k[0].what, k[0].variant, k[1])):
        base = None if operation.layout == "flat" else flat.get((operation.what, regime))
        fitted = fit_line(of_key[operation, regime], regime, base)
        if operation.layout == "flat" and operation.variant in ("", "y in the window"):
            flat[operation.what, regime] = fitted.line
        yield (operation, regime), fitted


def _regime(row: Row) -> str:
    return FEW if row.tokens <= MOST_FEW else MANY


def _error(row: Row, lines: dict[Key, Fitted]) -> dict[str, Any]:
    us = lines[row.parts[0].operation, _regime(row)].line.us(row.parts[0].load)
    about = {**asdict(row.parts[0].operation), "regime": _regime(row), "payload": row.payload, "tokens": row.tokens}
    return {
        "file": row.file,
        **about,
        "measured_us": row.us,
        "fitted_us": round(us, 3),
        "error": round(us / row.us - 1, 4),
    }


def _written(key: Key, fitted: Fitted, errors: list[dict[str, Any]]) -> dict[str, Any]:
    operation, regime = key
    own = [abs(e["error"]) for e in errors if (Operation(e["what"], e["layout"], e["variant"]), e["regime"]) == key]
    return {
        **asdict(operation),
        "regime": regime,
        **{name: round(value, 4) for name, value in asdict(fitted.line).items()},
        "borrowed": list(fitted.borrowed),
        "rows": len(own),
        "median_error": round(statistics.median(own), 4),
        "worst_error": round(max(own), 4),
    }


def _gemm(overlaps: list[dict[str, float]]) -> dict[str, float]:
    if not overlaps:
        raise BadInput("results", "no row with a GEMM beside it", "one result of --overlap-gemm among them")
    return {
        "tflops": statistics.median(overlap["gemm_tflops"] for overlap in overlaps),
        "kept": statistics.median(overlap["kept"] for overlap in overlaps),
    }


def write(path: Path, fitted: dict[str, Any]) -> None:
    """Write the fit as JSON, with one text line for each line and row."""
    parts = []
    for name, value in fitted.items():
        listed = isinstance(value, list) and value and isinstance(value[0], dict)
        inside = ",\n".join(f"  {json.dumps(one)}" for one in value) if listed else ""
        parts.append(f' "{name}": ' + (f"[\n{inside}\n ]" if listed else json.dumps(value)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
