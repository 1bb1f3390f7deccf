"""Common parts of all plots: the axis of tokens, and saving."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moecomm.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LEVEL = 6  # most labels that fit horizontally
_SUFFIXES = (".png", ".svg", ".pdf")


def over_tokens(axes: Axes, title: str, tokens: Iterable[int], y: str) -> None:
    """Label the axes, with tokens on a logarithmic x axis."""
    sizes = list(tokens)
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log", base=2)
    crowded = {"rotation": 90, "fontsize": 6} if len(sizes) > _MOST_LEVEL else {"fontsize": 7}
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False, **crowded)
    axes.minorticks_off()
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def save(figure: Figure, out: Path, digest: str) -> None:
    """Save a figure; an SVG keeps `digest` as its description. Raises BadInput for an unknown suffix."""
    if out.suffix not in _SUFFIXES:
        raise BadInput("the picture", str(out), f"a name with one of {', '.join(_SUFFIXES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": digest} if out.suffix == ".svg" else {}
    figure.savefig(out, dpi=150, metadata=metadata)
