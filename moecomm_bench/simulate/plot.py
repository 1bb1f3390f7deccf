"""Plots of predicted times over the number of GPUs, with a line for each number of tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.errors import Unsupported
from moecomm_bench.plot_axes import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = {("dispatch", "us"): ("-", "o"), ("combine", "us"): ("--", "s")}
_LAYERS = {("layer", "serial_us"): ("-", "o"), ("layer", "overlapped_us"): ("--", "s"), ("layer", "gemm_us"): (":", "")}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw dispatch and combine on the left, the layer on the right.

    Raises:
        BadInput: the suffix of `out` names no picture format.
        Unsupported: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'moecomm[bench]'") from None
    # Equal numbers give an equal file: no date, no random names.
    with matplotlib.rc_context({"svg.hashsalt": "moecomm", "font.size": 9}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        for axes, lines in zip(figure.subplots(1, 2), (_LINES, _LAYERS), strict=True):
            _draw(axes, result["rows"], lines)
        case, nic = result["case"], result["inputs"]["nic"]
        figure.suptitle(
            f"Predicted, not measured: {case['model'] or 'numbers given'}, {case['ranks']} GPUs a domain, "
            f"NIC {nic['gbs']:g} GB/s",
            fontsize=9,
        )
        save(figure, out, digest(result))


def digest(result: dict[str, Any]) -> str:
    """Return the description in an SVG: a hash of the rows of the result."""
    return "sha256 of rows " + hashlib.sha256(json.dumps(result["rows"]).encode()).hexdigest()


def _draw(axes: Axes, rows: list[dict[str, Any]], lines: dict[tuple[str, str], tuple[str, str]]) -> None:
    gpus = sorted({row["gpus"] for row in rows})
    for number, tokens in enumerate(sorted({row["tokens"] for row in rows})):
        own = sorted((row for row in rows if row["tokens"] == tokens), key=lambda row: int(row["gpus"]))
        for (what, part), (dashes, marker) in lines.items():
            axes.plot(
                [row["gpus"] for row in own],
                [row[what][part] for row in own],
                color=f"C{number % 10}",
                linestyle=dashes,
                marker=marker,
                markersize=3,
                linewidth=1.2,
                label=f"{tokens} tokens, {what if part == 'us' else part.removesuffix('_us')}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("us")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
