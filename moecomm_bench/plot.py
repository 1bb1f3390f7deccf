"""Plots of results: dispatch and combine over tokens; layers, grouped GEMMs, links and operators by plot_*.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecomm.errors import BadInput, Unsupported
from moecomm_bench import (
    beside,
    plot_beside,
    plot_domains,
    plot_gemms,
    plot_layers,
    plot_links,
    plot_operators,
    plot_times,
    schema,
)
from moecomm_bench.plot_axes import over_tokens, save
from moecomm_bench.plot_looks import ROW_INCHES, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = ("dispatch-combine", "moe", "gemm", "overlap", *plot_links.KINDS, plot_domains.PREDICTED)  # benchmarks
Draw = Callable[..., None]  # (axes, result)
_COLORS = {"dispatch": "tab:blue", "combine": "tab:orange", "pair": "tab:green"}
_LINES = ("-", "--", ":", "-.")
_MARKERS = "osv^Dx"
_MOST_PANELS = 64  # rows of a picture


def draw(results: Iterable[Path], out: Path) -> None:
    """Draw all results into one plot, a row of panels for each, or each model of moe and gemm, or operator of overlap.

    Raises BadInput for a file that is no such result, or a name that is no picture's; Unsupported without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'moecomm[bench]'") from None
    paths = list(results)
    found = [_read(path) for path in paths]
    # Equal numbers give an equal file: no date, no random names.
    # Names are no formulas.
    with matplotlib.rc_context({"svg.hashsalt": "moecomm", "font.size": 8, "text.parse_math": False}):
        save(figure_of(found), out, digest(paths))


def figure_of(results: Sequence[dict[str, Any]]) -> Figure:
    """Make the figure of results that can be drawn: a row of half a page for each pair of panels."""
    from matplotlib.figure import Figure

    panels = [panel for result in results for panel in _panels(result)]
    if not panels or len(panels) > _MOST_PANELS:
        raise BadInput("results", f"{len(panels)} rows of panels", f"1 to {_MOST_PANELS}: fewer models or results")
    width, height = ROW_INCHES
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    for row, draw_them in zip(figure.subfigures(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        pair = row.subplots(1, 2)
        for axes, draw_one in zip(pair, draw_them, strict=True):
            draw_one(axes)
        finish(row, pair)
    return figure


def digest(results: Iterable[Path]) -> str:
    """Return the digest by which an SVG names its sources."""
    return "sha256 " + hashlib.sha256(b"".join(path.read_bytes() for path in results)).hexdigest()


def series(result: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return rows with figures by (what, label), sorted by tokens. Of several SM counts only the first is used."""
    sms = result["case"]["sms"][0]
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "us" in row and (row["who"] != "moecomm" or row["sms_asked"] == sms):
            how = " ".join(filter(None, (row["who"], row["layout"], row["what"], row["payload"], row["variant"])))
            lines.setdefault((row["what"], how), []).append(row)
    return {key: sorted(rows, key=lambda row: int(row["tokens"])) for key, rows in lines.items()}


def _panels(result: dict[str, Any]) -> list[tuple[Callable[[Axes], None], ...]]:
    """Return the functions that draw the left and the right panel of each row."""
    if result["benchmark"] == "dispatch-combine":
        if beside.has_peers(result):
            few, many = result["case"]["tokens"][0], result["case"]["tokens"][-1]
            return [tuple(partial(plot_beside.draw, result=result, tokens=tokens) for tokens in (few, many))]
        rows = [(_draw_times, _draw_bandwidths)]
        if plot_times.lines(result, "alone_us"):
            rows.append((plot_times.draw_alone, plot_times.draw_eager))
        return _bound(rows, result)
    if result["benchmark"] in plot_links.KINDS:
        rows = [(plot_links.draw_times, plot_links.draw_speeds)]
        if result["benchmark"] == "backends" and len(plot_domains.counts(result)) > 1:
            rows.append((plot_domains.draw_times, plot_domains.draw_speeds))
        return _bound(rows, result)
    if result["benchmark"] == plot_domains.PREDICTED:
        return _bound([(plot_domains.draw_times, plot_domains.draw_speeds)], result)
    if result["benchmark"] == "gemm":
        of_gemms = (plot_gemms.draw_times, plot_gemms.draw_speeds)
        return [
            tuple(partial(draw_one, result=result, part=part) for draw_one in of_gemms)
            for part in plot_gemms.parts(result)
        ]
    if result["benchmark"] == "overlap":
        of_operators = (plot_operators.draw_times, plot_operators.draw_ratios)
        return [
            tuple(partial(draw_one, result=result, operator=operator) for draw_one in of_operators)
            for operator in plot_operators.operators(result)
        ]
    both = (plot_layers.draw_times, plot_layers.draw_ratios)
    return [
        tuple(partial(draw_one, result=result, model=model) for draw_one in both)
        for model in plot_layers.models(result)
    ]


def _bound(rows: Iterable[Iterable[Draw]], result: dict[str, Any]) -> list[tuple[Callable[[Axes], None], ...]]:
    return [tuple(partial(draw_one, result=result) for draw_one in row) for row in rows]


def _read(path: Path) -> dict[str, Any]:
    """Load a result that can be drawn.  Raises BadInput, which names a benchmark that has no plot."""
    found = schema.read(path)
    kind = found.get("benchmark", "none")
    if kind not in DRAWN:
        schema.RESULT.refuse(path, f"{kind}, which has no plot; `moecomm bench show` prints its table")
    if (not any("us" in row for row in found["rows"]) and kind != plot_domains.PREDICTED) or not found["rows"]:
        schema.RESULT.refuse(path, "no row with a time")
    return found


def _draw_times(axes: Axes, result: dict[str, Any]) -> None:
    limits = result["ceiling"]
    axes.set_yscale("log")
    for style, (_, how), rows in _styled(result):
        tokens = [row["tokens"] for row in rows]
        axes.plot(tokens, [row["us"]["p50"] for row in rows], label=how, **style)
        if limits and rows[0]["who"] == "moecomm":
            wire = [row["wire_bytes"] / limits[0]["gbs"] / 1e3 for row in rows]
            axes.plot(tokens, wire, color=style["color"], linewidth=0.6, alpha=0.5)
    times = [row["us"]["p50"] for rows in series(result).values() for row in rows]
    axes.set_ylim(bottom=0.5 * min(times, default=1.0))
    _label(axes, result, "us (thin: wire time at the ceiling)")


def _draw_bandwidths(axes: Axes, result: dict[str, Any]) -> None:
    for style, (_, how), rows in _styled(result):
        axes.plot([row["tokens"] for row in rows], [row["wire_gbs"] for row in rows], label=how, **style)
    if result["ceiling"]:
        best, kind = result["ceiling"][0], beside.ceiling_is(result["rows"])
        axes.axhline(best["gbs"], color="black", linewidth=0.8, label=f"all-to-all {kind} ({best['method']})")
    axes.set_ylim(bottom=0)
    _label(axes, result, "GB/s that leave a rank for others")


def _label(axes: Axes, result: dict[str, Any], y: str) -> None:
    case, gpus = result["case"], result["machine"]["gpus"]
    machine = gpus[0] if gpus and case["backend"] != "host" else result["machine"]["cpu"]
    sizes = f"hidden {case['hidden']}, top-{case['topk']} of {case['experts']}"
    title = f"{case['ranks']} ranks, {machine}: {case['model'] or 'numbers given'}, {sizes}"
    over_tokens(axes, title, case["tokens"], y)


def _styled(result: dict[str, Any]) -> Iterable[tuple[dict[str, Any], tuple[str, str], list[dict[str, Any]]]]:
    """Yield lines with their styles: color by operation, dashes by library, markers by variant."""
    lines = series(result)
    whos = list(dict.fromkeys(rows[0]["who"] for rows in lines.values()))
    counts: dict[tuple[str, str], int] = {}
    for key, rows in lines.items():
        who, what = rows[0]["who"], key[0]
        number = counts[who, what] = counts.get((who, what), -1) + 1
        yield (
            {
                "color": _COLORS.get(what, "tab:gray"),
                "linestyle": _LINES[whos.index(who) % len(_LINES)],
                "marker": _MARKERS[number % len(_MARKERS)],
                "markersize": 3,
                "linewidth": 1.2,
            },
            key,
            rows,
        )
