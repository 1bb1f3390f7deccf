"""Axes and files that all plots share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LEVEL = 6  # most labels that fit horizontally
_SUFFIXES = (".png", ".svg", ".pdf")


def over_tokens(axes: Axes, title: str, tokens: Iterable[int], y: str) -> None:
    """Label the axes, and mark the numbers of tokens on a logarithmic one."""
    over_powers(axes, title, tokens, "tokens a rank", y)


def over_powers(axes: Axes, title: str, values: Iterable[int], x: str, y: str) -> None:
    """Label the axes, and mark the values on one that is logarithmic, or linear if 0 is among them."""
    sizes = list(values)
    axes.set_title(title, fontsize=9)
    if 0 not in sizes:
        axes.set_xscale("log", base=2)
    crowded = {"rotation": 90, "fontsize": 6} if len(sizes) > _MOST_LEVEL else {"fontsize": 7}
    axes.set_xticks(sizes, [_short(size) for size in sizes], minor=False, **crowded)
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def machine_of(result: dict[str, Any]) -> str:
    """The GPU of a result, or its CPU."""
    machine = result["machine"]
    return str(machine["gpus"][0] if machine["gpus"] else machine["cpu"])


def save(figure: Figure, out: Path, digest: str) -> None:
    """Save a plot; an SVG names its sources by `digest`.  Raises BadInput for a suffix that is no picture's."""
    if out.suffix not in _SUFFIXES:
        raise BadInput("the picture", str(out), f"a name with one of {', '.join(_SUFFIXES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": digest} if out.suffix == ".svg" else {}
    figure.savefig(out, dpi=150, metadata=metadata)


def _short(size: int) -> str:
    for unit, suffix in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if size >= unit and size % unit == 0 and size > 1 << 13:
            return f"{size // unit}{suffix}"
    return str(size)
