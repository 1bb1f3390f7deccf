"""Plots over the number of domains, as papers have them over nodes: measured through several backends, or predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from moecomm_bench.plot_axes import over_powers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREDICTED = "simulate"  # a benchmark
_ROUNDS = ("dispatch", "combine")


class Point(NamedTuple):
    """A round of many tokens: number of domains, microseconds, and GB/s that leave a rank for other domains."""

    domains: int
    us: float
    gbs: float


def counts(result: dict[str, Any]) -> list[int]:
    """Return the numbers of domains that a result of `backends` or `simulate` has."""
    if result["benchmark"] == PREDICTED:
        return sorted({row["domains"] for row in result["rows"]})
    return sorted({_domains(result, row) for row in result["rows"] if "us" in row})


def lines(result: dict[str, Any]) -> dict[str, list[Point]]:
    """Return points by the label of their line, of the largest number of tokens."""
    found: dict[str, list[Point]] = {}
    rows = [row for row in result["rows"] if result["benchmark"] == PREDICTED or "us" in row]
    most = max((row["tokens"] for row in rows), default=0)
    for row in rows:
        if row["tokens"] != most:
            continue
        if result["benchmark"] == PREDICTED:
            for what in _ROUNDS:
                part = row[what]
                point = Point(row["domains"], part["us"], part["slow_bytes"] / part["us"] / 1e3)
                found.setdefault(what, []).append(point)
        elif row["what"] in _ROUNDS:
            how = (row["backend"], row["layout"], row["what"], row["payload"], row["variant"])
            point = Point(_domains(result, row), row["us"]["p50"], row["across_gbs"])
            found.setdefault(" ".join(filter(None, how)), []).append(point)
    return {label: sorted(points) for label, points in found.items()}


def draw_times(axes: Axes, result: dict[str, Any]) -> None:
    """Draw microseconds, p50 or predicted."""
    axes.set_yscale("log")
    _draw(axes, result, "us", "us")


def draw_speeds(axes: Axes, result: dict[str, Any]) -> None:
    """Draw the bandwidth between domains."""
    _draw(axes, result, "gbs", "GB/s that leave a rank for other domains")
    axes.set_ylim(bottom=0)


def _draw(axes: Axes, result: dict[str, Any], field: str, y: str) -> None:
    for number, (label, points) in enumerate(lines(result).items()):
        color = f"C{number % 10}"
        at, values = [point.domains for point in points], [getattr(point, field) for point in points]
        axes.plot(at, values, label=label, color=color, marker="o", markersize=3, linewidth=1.2)
    case = result["case"]
    tokens = max(row["tokens"] for row in result["rows"])
    predicted = result["benchmark"] == PREDICTED
    how = f"predicted, domains of {case['ranks']} ranks" if predicted else f"{case['ranks']} ranks"
    title = ", ".join(filter(None, (case["model"], how, f"{tokens} tokens a rank")))
    over_powers(axes, title, counts(result), "domains", y)


def _domains(result: dict[str, Any], row: dict[str, Any]) -> int:
    ranks = int(result["case"]["ranks"])
    return ranks // (row["domain_ranks"] or ranks)
