"""Pictures of results: `moecomm bench plot` reads files, and bench/readme.py draws those of the pages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.errors import BadInput, Unsupported
from moecomm_bench import result_file
from moecomm_bench.plot_panels import figure_of as figure_of_rows
from moecomm_bench.plot_results import KINDS, about, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = tuple(KINDS)  # benchmarks
_SUFFIXES = (".png", ".svg", ".pdf")
_MOST_ROWS = 64  # of a picture


def draw(results: Iterable[Path], out: Path) -> None:
    """Draw all results into one picture, one below the other.

    Raises BadInput for a file that is no such result, or a name that is no picture's; Unsupported without matplotlib.
    """
    _require_matplotlib()
    paths = list(results)
    read = [_read(path) for path in paths]
    with result_file.reading(*paths):
        save(read, out, digest(paths))


def save(results: Sequence[dict[str, Any]], out: Path, sources: str) -> None:
    """Draw results that can be drawn; an SVG has the description `sources`.  Raises as `draw` does."""
    _require_matplotlib()
    import matplotlib

    if out.suffix not in _SUFFIXES:
        raise BadInput("the picture", str(out), f"a name with one of {', '.join(_SUFFIXES)}")
    # Equal numbers give an equal file: no date, no random names.
    # Names are no formulas.
    with matplotlib.rc_context({"svg.hashsalt": "moecomm", "font.size": 8, "text.parse_math": False}):
        figure = figure_of(results)
        # The layout settles, but for its last bits, which depend on addresses in memory.
        figure.savefig(BytesIO(), format=out.suffix[1:], dpi=150)
        figure.set_layout_engine("none")
        for axes in figure.axes:
            left, bottom, width, height = (round(part, 4) for part in axes.get_position().bounds)
            axes.set_position((left, bottom, width, height))
        out.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": sources} if out.suffix == ".svg" else {}
        figure.savefig(out, dpi=150, metadata=metadata)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'moecomm[bench]'") from None


def figure_of(results: Sequence[dict[str, Any]]) -> Figure:
    """Make the figure of results that can be drawn."""
    rows = [row for result in results for row in rows_of(result)]
    if not rows or len(rows) > _MOST_ROWS:
        raise BadInput("results", f"{len(rows)} rows of panels", f"1 to {_MOST_ROWS}: fewer models or results")
    return figure_of_rows("; ".join(dict.fromkeys(map(about, results))), rows)


def digest(results: Iterable[Path]) -> str:
    """Return the digest by which an SVG names its sources."""
    return "sha256 " + hashlib.sha256(b"".join(path.read_bytes() for path in results)).hexdigest()


def digest_of(result: dict[str, Any]) -> str:
    """Return the same for a result that lies in no file: it says that it is of the rows."""
    return "sha256 of rows " + hashlib.sha256(json.dumps(result["rows"]).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Load a result that can be drawn.  Raises BadInput, which names a benchmark that has no plot."""
    result = result_file.read(path)
    kind = result.get("benchmark", "none")
    if kind not in DRAWN:
        result_file.RESULT.refuse(path, f"{kind}, which has no plot; `moecomm bench show` prints its table")
    with result_file.reading(path):
        has_times = bool(result["rows"]) and (kind == "simulate" or any("us" in row for row in result["rows"]))
    if not has_times:
        result_file.RESULT.refuse(path, "no row with a time")
    return result
