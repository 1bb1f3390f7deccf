"""Plots of links: `moecomm bench latency` over bytes, `all-to-all` over SMs, and `backends` over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from moecomm_bench.plot_axes import machine_of, over_powers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Kind(NamedTuple):
    """The way a benchmark is drawn."""

    name: str  # in the title
    over: str  # the field on the x axis
    x: str
    by: tuple[str, ...]  # the fields by which lines differ
    speed: str  # the field in GB/s
    y: str


_LINK = ("backend", "domain_ranks", "method")
_ROUND = ("backend", "domain_ranks", "layout", "what", "payload", "variant")
KINDS = {
    "latency": Kind("puts", "bytes", "bytes", _LINK, "gbs", "GB/s"),
    "latency-backends": Kind("puts", "bytes", "bytes", _LINK, "gbs", "GB/s"),
    "all-to-all": Kind("all-to-all", "sms", "SMs (0: copy engines)", ("method",), "gbs", "GB/s a rank"),
    "backends": Kind("backends", "tokens", "tokens a rank", _ROUND, "wire_gbs", "GB/s that leave a rank for others"),
}


def lines(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows with figures by the label of their line, over the x axis.  The label has the fields in which rows differ."""
    kind = KINDS[result["benchmark"]]
    rows = [row for row in result["rows"] if "us" in row]
    apart = [field for field in kind.by if field not in _shared(rows, kind)]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(" ".join(filter(None, (_word(row, field) for field in apart))), []).append(row)
    return {label: sorted(rows, key=lambda row: int(row[kind.over])) for label, rows in found.items()}


def draw_times(axes: Axes, result: dict[str, Any]) -> None:
    """Draw microseconds, p50."""
    if KINDS[result["benchmark"]].over != "sms":
        axes.set_yscale("log")
    _draw(axes, result, "us", lambda row: row["us"]["p50"])


def draw_speeds(axes: Axes, result: dict[str, Any]) -> None:
    """Draw bandwidth.  Of puts on a logarithmic axis: from 4 bytes to 4 MiB it spans six powers of ten."""
    kind = KINDS[result["benchmark"]]
    if kind.over == "bytes":
        axes.set_yscale("log")
    _draw(axes, result, kind.y, lambda row: row[kind.speed])
    if kind.over != "bytes":
        axes.set_ylim(bottom=0)


def _shared(rows: list[dict[str, Any]], kind: Kind) -> list[str]:
    """The fields that are the same in all rows, if there are several lines: the title has them."""
    alike = [field for field in kind.by if len({row.get(field) for row in rows}) == 1]
    return alike if len(alike) < len(kind.by) else []


def _word(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    return f"domains of {value}" if field == "domain_ranks" and value else str(value or "")


def _draw(axes: Axes, result: dict[str, Any], y: str, value: Any) -> None:
    kind, points = KINDS[result["benchmark"]], set()
    for number, (label, rows) in enumerate(lines(result).items()):
        at = [row[kind.over] for row in rows]
        points |= set(at)
        color = f"C{number % 10}"
        axes.plot(at, [value(row) for row in rows], label=label, color=color, marker="o", markersize=3, linewidth=1.2)
    case = result.get("case") or {}
    ranks = case.get("ranks", result.get("ranks"))
    measured = [row for row in result["rows"] if "us" in row]
    about = [_word(measured[0], field) for field in _shared(measured, kind)]
    title = ", ".join(filter(None, (kind.name, *about, f"{ranks} ranks" if ranks else "", machine_of(result))))
    over_powers(axes, title, sorted(points), kind.x, y)
