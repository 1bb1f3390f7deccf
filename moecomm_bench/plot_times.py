"""Plots of one operation's times over tokens: alone, with the spread of single calls, and eager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm_bench.plot_axes import machine_of, over_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def lines(result: dict[str, Any], times: str) -> dict[str, list[tuple[int, float, float]]]:
    """Return (tokens, p50, p99) by the label of a line; without pairs. `times` is "alone_us" or "eager_us".

    Where the mode is eager, `us` has the eager times.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    field = "us" if times == "eager_us" and result["case"].get("mode") == "eager" else times
    for row in result["rows"]:
        if "alone_us" in row and field in row and row["what"] != "pair":
            how = (row["who"], row["layout"], row["what"], row["payload"], row["variant"])
            if row["who"] == "moecomm" and row["sms_asked"] != result["case"]["sms"][0]:
                continue
            point = (row["tokens"], row[field]["p50"], row[field]["p99"])
            found.setdefault(" ".join(filter(None, how)), []).append(point)
    return {label: sorted(points) for label, points in found.items()}


def draw_alone(axes: Axes, result: dict[str, Any]) -> None:
    """Draw the median of single calls as a line, and a bar from there to p99."""
    _draw(axes, result, "alone_us", "us alone, bars to p99")


def draw_eager(axes: Axes, result: dict[str, Any]) -> None:
    """Draw the period of eager calls likewise."""
    _draw(axes, result, "eager_us", "us eager, bars to p99")


def _draw(axes: Axes, result: dict[str, Any], times: str, y: str) -> None:
    axes.set_yscale("log")
    drawn = lines(result, times)
    for number, (label, points) in enumerate(drawn.items()):
        at, medians, most = zip(*points, strict=True)
        color = f"C{number % 10}"
        axes.plot(at, medians, label=label, color=color, marker="o", markersize=3, linewidth=1.2)
        axes.vlines(at, medians, most, color=color, linewidth=0.6)
    case = result["case"]
    title = ", ".join(filter(None, (case["model"], "alone and eager", f"{case['ranks']} ranks", machine_of(result))))
    over_tokens(axes, title, sorted({point[0] for points in drawn.values() for point in points}), y)
