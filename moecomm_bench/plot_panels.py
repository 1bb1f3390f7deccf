"""Small multiples: panels of at most four lines, each labelled where it ends, and panels of dots by case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MOST_LINES = 4  # of a panel
OURS, OTHERS, REFERENCE = "tab:blue", ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown"), "tab:gray"
DASHES = ("-", "--", ":", "-.")
_MARKERS = "osv^D"
_COLUMN_INCHES, _ROW_INCHES, _CASE_INCHES = 3.6, 1.9, 0.19
_GAP = 0.1  # of a panel's height, between labels


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
        points: (x, y), sorted by x.
        most: ends of bars above the points, such as 99th percentiles; empty without bars.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str = OURS
    dashes: str = "-"
    most: Sequence[float] = ()


class Panel(NamedTuple):
    """Lines over one axis.  Where values differ by less than three times, the scale is linear whatever `log_y` says."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_y: bool = True


class Dots(NamedTuple):
    """Cases from top to bottom, and a dot of each name on a logarithmic scale where 1 is moecomm.

    Attributes:
        cases: labels of the cases.
        dots: by name, the ratio for each case that has one.
    """

    title: str
    x: str
    cases: Sequence[str]
    dots: Mapping[str, Mapping[int, float]]


Row = Sequence[Panel | Dots]


def split(lines: Sequence[Line], keep: Sequence[Line] = ()) -> list[list[Line]]:
    """Return the lines of as many panels as needed; each begins with the lines `keep`."""
    room = MOST_LINES - len(keep)
    count = -(-len(lines) // room)
    each = -(-len(lines) // max(count, 1))
    return [[*keep, *lines[begin : begin + each]] for begin in range(0, len(lines), max(each, 1))]


def figure_of(title: str, rows: Sequence[Row]) -> Figure:
    """Return a figure of rows of panels."""
    from matplotlib.figure import Figure

    heights = [max(_height(panel) for panel in row) for row in rows]
    columns = max(2 * isinstance(row[0], Dots) or len(row) for row in rows)
    figure = Figure(figsize=(_COLUMN_INCHES * max(columns, 2), sum(heights) + 0.3), layout="constrained")
    figure.suptitle(title, fontsize=8)
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    shared = None  # by all dots: one scale, one legend
    names = list(dict.fromkeys(name for row in rows for panel in row if isinstance(panel, Dots) for name in panel.dots))
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            if isinstance(panel, Dots):
                axes = figure.add_subplot(grid[number, :], sharex=shared)
                _draw_dots(axes, panel, names)
                if shared is None:
                    shared = axes
                    _name_dots(axes, names)
            else:
                _draw_lines(figure.add_subplot(grid[number, column]), panel)
    return figure


def _height(panel: Panel | Dots) -> float:
    return _CASE_INCHES * len(panel.cases) + 0.9 if isinstance(panel, Dots) else _ROW_INCHES


def _draw_lines(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=7, loc="left")
    places = sorted({x for line in panel.lines for x, _ in line.points})
    if places and places[0] > 0:
        axes.set_xscale("log", base=2)
    heights = [y for line in panel.lines for _, y in line.points]
    log_y = panel.log_y and min(heights) > 0 and max(heights) >= 3 * min(heights)
    if log_y:
        axes.set_yscale("log")
    for line, marker in zip(panel.lines, _MARKERS, strict=False):
        at, values = zip(*line.points, strict=True)
        thin: dict[str, Any] = (
            {"linewidth": 0.8, "marker": ""} if line.color == REFERENCE else {"linewidth": 1.3, "marker": marker}
        )
        axes.plot(at, values, color=line.color, linestyle=line.dashes, markersize=3, **thin)
        if line.most:
            axes.vlines(at, values, line.most, color=line.color, linewidth=0.6)
    crowded = {"rotation": 90, "fontsize": 5} if len(places) > 6 else {"fontsize": 6}
    axes.set_xticks(places, [_short(place) for place in places], minor=False, **crowded)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel(panel.x, fontsize=6)
    axes.set_ylabel(panel.y, fontsize=6)
    axes.grid(alpha=0.3)
    axes.margins(y=0.12)
    if log_y:
        _number(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    _label_ends(axes, panel.lines)


def _label_ends(axes: Axes, lines: Iterable[Line]) -> None:
    """Write the label of each line beside its end, moved up or down so that labels do not touch."""
    place = axes.transScale + axes.transLimits
    ends = sorted(((place.transform(line.points[-1])[1], line) for line in lines), key=lambda end: end[0])
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max(height, heights[-1] + _GAP if heights else 0.0))
    over = max(heights[-1] - 1.0, 0.0) if heights else 0.0
    for index in reversed(range(len(heights))):  # what is too high moves down, and what is below it
        ceiling = heights[index + 1] - _GAP if index + 1 < len(heights) else heights[index] - over
        heights[index] = min(heights[index], ceiling)
    for height, (_, line) in zip(heights, ends, strict=True):
        axes.annotate(
            line.label,
            xy=line.points[-1],
            xytext=(1.04, height),
            textcoords="axes fraction",
            fontsize=6,
            color=line.color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.color, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 2},
        )


def _look(names: Sequence[str], name: str) -> dict[str, Any]:
    nth = names.index(name)
    color = REFERENCE if name.endswith("alone") else OTHERS[nth % len(OTHERS)]
    return {"color": color, "marker": _MARKERS[nth % len(_MARKERS)], "linestyle": "none"}


def _draw_dots(axes: Axes, panel: Dots, names: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=OURS, linewidth=1.6)
    for name, ratios in panel.dots.items():
        apart = 0.14 * (names.index(name) - (len(names) - 1) / 2)  # equal ratios do not cover each other
        places = [case + apart for case in ratios]
        axes.plot([*ratios.values()], places, markersize=4.5, label=name, **_look(names, name))
    axes.margins(x=0.04)
    axes.set_ylim(len(panel.cases) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.cases)), panel.cases, fontsize=6)
    axes.tick_params(axis="x", labelsize=6)
    _number(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.set_xlabel(panel.x, fontsize=6)
    heading: dict[str, Any] = {
        "fontsize": 7,
        "ha": "right",
        "va": "bottom",
        "annotation_clip": False,
        "textcoords": "offset points",
    }
    axes.annotate(panel.title, xy=(0, 1), xytext=(-3, 3), xycoords="axes fraction", **heading)


def _name_dots(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], markersize=4.5, **_look(names, name)) for name in names]
    marks.append(Line2D([], [], color=OURS, linewidth=1.6))
    look: dict[str, Any] = {
        "fontsize": 6,
        "frameon": False,
        "handletextpad": 0.4,
        "columnspacing": 0.8,
        "handlelength": 1.2,
        "borderaxespad": 0.2,
    }
    axes.legend(marks, [*names, "moecomm"], loc="lower right", bbox_to_anchor=(1, 1), ncols=len(marks), **look)


def _number(axis: Axis) -> None:
    """Label digits of each power of ten in plain numbers: the more, the shorter the range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shortest, longest = axis.get_view_interval()
    over = longest / shortest
    digits = (1.0, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7) if over < 5 else (1, 1.5, 2, 3, 5, 7) if over < 50 else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=digits if over < 1000 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _short(size: float) -> str:
    for unit, suffix in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if size >= unit and size % unit == 0 and size > 1 << 13:
            return f"{size // unit:g}{suffix}"
    return f"{size:g}"
