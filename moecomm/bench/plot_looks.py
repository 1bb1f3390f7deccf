"""The looks of a row of panels: one title, lines that color and marker tell apart, one legend below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.lines import Line2D

ROW_INCHES = (7.0, 4.5)  # what fits a page
_MARKERS = "os^vDxP*<>hX+1234"
_COLUMNS = 3  # of the legend


def finish(figure: SubFigure, panels: Sequence[Axes]) -> None:
    """Titles a row as its first panel is, gives lines their markers, and puts the legend outside of the panels."""
    figure.suptitle(panels[0].get_title(), fontsize=8)
    for axes in panels:
        axes.set_title("")
        axes.title.set_visible(False)
        if axes.get_yscale() == "log":
            _number(axes)
        elif axes.get_ylim()[0] == 0:
            axes.set_ylim(0, axes.dataLim.y1 * 1.05)  # no marker lies on the frame
    lines = labelled(panels)
    distinguish(lines)
    by_label = {str(line.get_label()): line for line in lines}
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=_COLUMNS, fontsize=6)


def labelled(panels: Sequence[Axes]) -> list[Line2D]:
    """The lines that a legend names."""
    return [line for axes in panels for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def distinguish(lines: Sequence[Line2D]) -> None:
    """Gives lines of different labels different pairs of color and marker, and those of one label the same marker.
    A line that has a marker of its own keeps it if it can; one without, such as a limit, stays without.
    """
    taken: dict[tuple[str, str], str] = {}
    for line in lines:
        own, color, label = str(line.get_marker()), str(line.get_color()), str(line.get_label())
        if own in ("None", "none", "", " "):
            continue
        marker = next(m for m in (own, *_MARKERS) if taken.get((color, m), label) == label)
        taken[color, marker] = label
        line.set_marker(marker)


def _number(axes: Axes) -> None:
    """Labels 1, 2 and 5 of each power of ten in plain numbers; a range within one power would have hardly any."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
