"""Bars of dispatch and combine beside other libraries: a panel for each number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm_bench import beside
from moecomm_bench.plot_axes import machine_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "moecomm": "tab:blue",
    "DeepEP V1": "tab:orange",
    "DeepEP V2": "tab:red",
    "NCCL EP": "tab:green",
    "FlashInfer": "tab:purple",
    "pplx-kernels": "tab:brown",
}
_ROOM = 0.8  # of a group of bars


def draw(axes: Axes, result: dict[str, Any], tokens: int) -> None:
    """Draw times in a graph of the best setting of each library: FP8 dispatches, and combines."""
    found = [
        one
        for one in beside.operations(result)
        if one.tokens == tokens and one.payload != "bf16" and one.variant != "y in the window"
    ]
    there = [name for name in beside.libraries(result) if any(name in one.best for one in found)]
    for nth, name in enumerate(there):
        color, width = _COLORS[name], _ROOM / len(there)
        at = [group for group, one in enumerate(found) if name in one.best]
        heights = [found[group].best[name].us for group in at]
        places = [group + (nth - (len(there) - 1) / 2) * width for group in at]
        axes.bar(places, heights, width, color=color)
        axes.plot([], [], "s", color=color, label=name)  # of the legend, which is of lines
        for place, height in zip(places, heights, strict=True):
            text = f"{height:.0f}" if height >= 100 else f"{height:.1f}"
            axes.text(place, height, f" {text}", ha="center", va="bottom", fontsize=5, rotation=90)
    axes.set_xticks(range(len(found)), [f"{one.layout}\n{one.what}" for one in found], fontsize=6)
    axes.set_xlabel(f"{tokens} tokens a rank, FP8 dispatch, bf16 combine")
    axes.set_title(f"{result['case']['ranks']} {machine_of(result)}, {result['case']['model']}")
    axes.set_ylabel("microseconds, in a graph")
    axes.set_ylim(0, max((best.us for one in found for best in one.best.values()), default=1.0))
