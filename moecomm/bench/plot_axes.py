"""What the panels of all pictures have in common: tokens from left to right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_tokens(axes: Axes, title: str, tokens: Iterable[int], y: str) -> None:
    """Names the axes, and marks the sizes on a logarithmic one."""
    sizes = list(tokens)
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=7, minor=False)
    axes.minorticks_off()
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
