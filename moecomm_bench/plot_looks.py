"""Style of a row of panels: one title, lines told apart by color and marker, one legend below."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import SubFigure
    from matplotlib.lines import Line2D

ROW_INCHES = (7.0, 4.5)  # fits a page
_MARKERS = "os^vDxP*<>hX+1234"
_COLUMNS = 3  # of the legend


def finish(figure: SubFigure, panels: Sequence[Axes]) -> None:
    """Move the first panel's title to the row, assign markers, and put one legend outside of the panels."""
    figure.suptitle(panels[0].get_title(), fontsize=8)
    for axes in panels:
        axes.set_title("")
        axes.title.set_visible(False)
        if axes.get_yscale() == "log":
            number(axes.yaxis)
        elif axes.get_ylim()[0] == 0 and isfinite(axes.dataLim.y1):
            axes.set_ylim(0, axes.dataLim.y1 * 1.05)  # keeps markers off the frame
    lines = labelled(panels)
    distinguish(lines)
    by_label = {str(line.get_label()): line for line in lines}
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=_COLUMNS, fontsize=6)


def labelled(panels: Sequence[Axes]) -> list[Line2D]:
    """Return the lines that appear in a legend."""
    return [line for axes in panels for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def distinguish(lines: Sequence[Line2D]) -> None:
    """Give lines with different labels different pairs of color and marker, and equal labels equal markers.

    A line keeps its own marker if possible; a line without one, such as a limit, stays without.
    """
    taken: dict[tuple[str, str], str] = {}
    for line in lines:
        own, color, label = str(line.get_marker()), str(line.get_color()), str(line.get_label())
        if own in ("None", "none", "", " "):
            continue
        marker = next(m for m in (own, *_MARKERS) if taken.get((color, m), label) == label)
        taken[color, marker] = label
        line.set_marker(marker)


def number(axis: Axis, digits: Sequence[int] = (1, 2, 5)) -> None:
    """Label these digits of each power of ten in plain numbers; with 1, 2 and 5 a range within one power has labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
