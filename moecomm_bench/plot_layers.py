"""Plots of expert layers over tokens, from the JSON of `moecomm bench moe`: time, and time over the GEMMs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm_bench.plot_axes import over_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[tuple[str, str, str], list[dict[str, Any]]]  # (who, what, variant), and its rows by tokens
_DRAWN = ("layer", "GEMMs")
_STYLES = {"layer": "-", "GEMMs": ":"}
_COLORS = {"moecomm": "tab:blue", "torch": "tab:orange"}
_OF_VARIANTS = {
    "two launches": "tab:green",
    "one launch": "tab:olive",
    "fp8": "tab:red",
    "fp8, two launches": "tab:purple",
    "fp8, one launch": "tab:pink",
    "bf16 wire": "tab:cyan",
    "default": "black",
    "rows by rank": "tab:brown",
    "fp8, bf16 wire": "mediumpurple",
    "fp8, default": "firebrick",
}


def models(result: dict[str, Any]) -> list[str]:
    """Return the models of a result."""
    return list(dict.fromkeys(row["model"] for row in result["rows"]))


def lines(result: dict[str, Any], model: str) -> list[Line]:
    """Return the rows with figures of a model's layers and GEMMs, by line, sorted by tokens."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["model"] == model and row["what"] in _DRAWN and "us" in row:
            found.setdefault((row["who"], row["what"], row["variant"]), []).append(row)
    return [(key, sorted(rows, key=lambda row: int(row["tokens"]))) for key, rows in found.items()]


def draw_times(axes: Axes, result: dict[str, Any], model: str) -> None:
    """Draw microseconds, both axes logarithmic."""
    axes.set_yscale("log")
    for key, rows in lines(result, model):
        axes.plot([row["tokens"] for row in rows], [row["us"]["p50"] for row in rows], **_style(key))
    _label(axes, result, model, "us")


def draw_ratios(axes: Axes, result: dict[str, Any], model: str) -> None:
    """Draw the time of each layer over that of our GEMMs alone."""
    for key, rows in lines(result, model):
        compared = [row for row in rows if "of_gemms" in row]
        if compared:
            axes.plot([row["tokens"] for row in compared], [row["of_gemms"] for row in compared], **_style(key))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    _label(axes, result, model, "time / GEMMs alone")


def _style(key: tuple[str, str, str]) -> dict[str, Any]:
    who, what, variant = key
    return {
        "label": " ".join(filter(None, key)),
        "color": _OF_VARIANTS.get(variant) or _COLORS.get(who, "tab:gray"),
        "linestyle": _STYLES[what],
        "marker": "o",
        "markersize": 3,
        "linewidth": 1.2,
    }


def _label(axes: Axes, result: dict[str, Any], model: str, y: str) -> None:
    case, gpus = result["case"], result["machine"]["gpus"]
    machine = gpus[0] if gpus and case["backend"] != "host" else result["machine"]["cpu"]
    over_tokens(axes, f"{case['ranks']} ranks, {machine}: {model or 'numbers given'}", case["tokens"], y)
