"""Plots of fused operators by case, from the JSON of `moecomm bench overlap`.

Left the time; right the time over that of the computation and NCCL's collective, one after the other, as papers on
fused operators show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm_bench.plot_axes import machine_of
from moecomm_bench.plot_looks import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _NCCL = "moecomm", "nccl"
# label and color by library
_DRAWN = {
    _OURS: ("moecomm, fused", "tab:blue"),
    _NCCL: ("computation and NCCL, sequential", "tab:orange"),
    "torch": ("torch, symmetric memory", "tab:green"),
    "alone": ("computation alone", "tab:gray"),
}
_WIDE = 500  # longest over shortest time, from which on 2 and 5 have no labels
Times = dict[str, dict[str, float]]  # microseconds by case and library


def operators(result: dict[str, Any]) -> list[str]:
    """Return the operators with figures."""
    return list(dict.fromkeys(row["operator"] for row in result["rows"] if "us" in row))


def times(result: dict[str, Any], operator: str) -> Times:
    """Return p50 of an operator's cases in their order; names have the dtype where there are several."""
    rows = [row for row in result["rows"] if row["operator"] == operator and "us" in row and row["who"] in _DRAWN]
    several = len({row["dtype"] for row in rows}) > 1
    found: Times = {}
    for row in rows:
        case = f"{row['case']}, {row['dtype']}" if several else row["case"]
        found.setdefault(case, {})[row["who"]] = row["us"]["p50"]
    return found


def draw_times(axes: Axes, result: dict[str, Any], operator: str) -> None:
    """Draw microseconds, with the names of the cases."""
    found = times(result, operator)
    axes.set_xscale("log")
    _draw(axes, found)
    shortest, longest = axes.get_xlim()
    number(axes.xaxis, (1, 2, 5) if longest < _WIDE * shortest else (1,))
    axes.set_xlabel("us")
    axes.set_yticks(range(len(found)), list(found), fontsize=6)
    axes.set_title(f"{operator}, {result['ranks']} ranks, {machine_of(result)}")


def draw_ratios(axes: Axes, result: dict[str, Any], operator: str) -> None:
    """Draw times over those with NCCL, of the cases that have them."""
    found = times(result, operator)
    ratios = {
        case: {who: us / of[_NCCL] for who, us in of.items()} if _NCCL in of else {} for case, of in found.items()
    }
    _draw(axes, ratios)
    axes.set_xlim(left=0)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time / computation and NCCL")
    axes.set_yticks(range(len(found)), [])


def _draw(axes: Axes, found: Times) -> None:
    for who, (label, color) in _DRAWN.items():
        points = [(of[who], place) for place, of in enumerate(found.values()) if who in of]
        if points:
            at, places = zip(*points, strict=True)
            above = 3 if who == _OURS else 2  # where points meet
            axes.plot(at, places, label=label, color=color, marker="o", markersize=4, linestyle="none", zorder=above)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=6)
    axes.grid(alpha=0.3)
