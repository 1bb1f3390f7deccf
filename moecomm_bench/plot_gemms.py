"""Plots of grouped GEMMs over tokens, from the JSON of `moecomm bench gemm`: time and TFLOP/s, ours and others'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm.fused.schedules import FP8_SCHEDULES, SCHEDULES
from moecomm_bench.plot_axes import machine_of, over_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = tuple[str, int]  # (model, ranks)
Key = tuple[str, int, str, str]  # (library, GEMM, activation, dtype)
_OURS = {*SCHEDULES, *FP8_SCHEDULES, "apart"}
_COLORS = {(1, "bf16"): "tab:blue", (2, "bf16"): "tab:green", (1, "fp8"): "tab:red", (2, "fp8"): "tab:purple"}
_STYLES = {"moecomm": "-", "torch": "--"}


def parts(result: dict[str, Any]) -> list[Part]:
    """Return (model, ranks) of all rows."""
    return list(dict.fromkeys((row["model"], row["ranks"]) for row in result["rows"]))


def lines(result: dict[str, Any], part: Part) -> dict[Key, list[tuple[int, float, float]]]:
    """Return (tokens, us, TFLOP/s) of a model by library and GEMM; ours with the chosen schedule."""
    found: dict[Key, list[tuple[int, float, float]]] = {}
    for row in result["rows"]:
        if (row["model"], row["ranks"]) != part:
            continue
        ours = row["us"][row["chosen"]]
        others = {who: us for who, us in row["us"].items() if who not in _OURS}
        for who, us in {"moecomm": ours, **others}.items():
            key = (who, row["gemm"], row["activation"] or "", row["dtype"])
            found.setdefault(key, []).append((row["tokens"], us, row["tflops"] * ours / us))
    return {key: sorted(points) for key, points in found.items()}


def draw_times(axes: Axes, result: dict[str, Any], part: Part) -> None:
    """Draw microseconds, both axes logarithmic."""
    axes.set_yscale("log")
    _draw(axes, result, part, 1, "us")


def draw_speeds(axes: Axes, result: dict[str, Any], part: Part) -> None:
    """Draw TFLOP/s, without tile padding."""
    _draw(axes, result, part, 2, "TFLOP/s")
    axes.set_ylim(bottom=0)


def _draw(axes: Axes, result: dict[str, Any], part: Part, column: int, y: str) -> None:
    tokens = set()
    for key, points in lines(result, part).items():
        who, gemm, activation, dtype = key
        tokens |= {point[0] for point in points}
        axes.plot(
            [point[0] for point in points],
            [point[column] for point in points],
            label=" ".join(filter(None, (who, f"GEMM {gemm}", activation, dtype))),
            color=_COLORS.get((gemm, dtype), "tab:gray"),
            linestyle=_STYLES.get(who, ":"),
            marker="o" if activation else "s",
            markersize=3,
            linewidth=1.2,
        )
    model, ranks = part
    machine = machine_of(result) if result["device"] == "cuda" else result["machine"]["cpu"]
    over_tokens(axes, f"{machine}, experts of one of {ranks} ranks: {model}", sorted(tokens), y)
