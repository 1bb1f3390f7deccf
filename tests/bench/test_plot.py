"""Plots: what is drawn is what was measured, and an SVG says from what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moecomm.errors import BadInput
from moecomm_bench import plot, plot_panels, plot_results

from ..few import few

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def result() -> dict[str, Any]:
    rows = []
    for tokens in (16, 1, 4):
        for who, what, sms in (("moecomm", "dispatch", 0), ("moecomm", "dispatch", 8), ("nccl", "dispatch", 0)):
            about = {"who": who, "what": what, "layout": "flat", "payload": "fp8", "variant": "", "sms_asked": sms}
            figures = {"us": {"p50": tokens * 2.0 + sms}, "wire_gbs": 10.0 * tokens, "wire_bytes": 1e6}
            rows.append({**about, "tokens": tokens, **figures})
    rows.append({**rows[0], "tokens": 64, "why": "no room"})
    del rows[-1]["us"]
    case = {"ranks": 4, "model": "", "hidden": 64, "topk": 2, "experts": 8, "backend": "host", "sms": [0, 8]}
    return {
        "benchmark": "dispatch-combine",
        "case": {**case, "tokens": [16, 1, 4, 64]},
        "machine": {"gpus": [], "cpu": "a CPU"},
        "ceiling": [{"gbs": 300.0, "method": "TMA write", "sms": 8}],
        "rows": rows,
    }


def panels(found: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Panels of lines by title and y axis."""
    rows = plot_results.rows_of(found)
    return {(panel.title, panel.y): panel for row in rows for panel in row if isinstance(panel, plot_panels.Panel)}


def lines(panel: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.label: list(line.points) for line in panel.lines}


def test_a_panel_has_an_operation_by_library_and_what_the_wire_allows() -> None:
    """The first of several numbers of SMs is drawn."""
    found = panels(result())
    assert list(found) == [("flat, dispatch, fp8", "us, a call"), ("flat, dispatch, fp8", "GB/s that leave a rank")]
    times, speeds = map(lines, found.values())
    assert times == {
        "wire time": [(tokens, pytest.approx(1e6 / 300e3)) for tokens in (1, 4, 16)],
        "moecomm": [(1, 2), (4, 8), (16, 32)],
        "nccl": [(1, 2), (4, 8), (16, 32)],
    }
    assert speeds["nccl"] == [(1, 10), (4, 40), (16, 160)]
    assert speeds["all-to-all ceiling"] == [(1, 300), (4, 300), (16, 300)]


def test_an_svg_says_what_it_was_drawn_from_and_is_the_same_each_time(tmp_path: Path) -> None:
    kept = json.loads((RESULTS / "cold-h200-2.json").read_text())
    source = tmp_path / "found.json"
    source.write_text(json.dumps(kept))
    for name in ("a.svg", "b.svg", "c.png"):
        plot.draw([source], tmp_path / name)
    with pytest.raises(BadInput, match=r"d\.gif"):
        plot.draw([source], tmp_path / "d.gif")
    assert plot.digest([source]) in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(kept | {"date": "2000-01-01"}))
    assert plot.digest([source]) not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("kind", ["decode", "training"])
def test_a_benchmark_without_a_plot_is_named(tmp_path: Path, kind: str) -> None:
    source = RESULTS / f"{kind}-h100-2.json"
    with pytest.raises(BadInput, match=rf"-h100-2\.json \({kind}, which has no plot; `moecomm bench show`"):
        plot.draw([source], tmp_path / "out.png")


def test_other_libraries_have_a_dot_where_they_have_a_time() -> None:
    us = {"p50": 40.0, "p99": 41.0}
    about = {"tokens": 128, "layout": "batched", "what": "pair", "payload": "fp8", "us": us, "alone_us": us}
    about |= {"sms": 0, "sms_asked": 0}
    case = {**result()["case"], "tokens": [128, 4096], "layouts": ["batched"], "payloads": ["fp8"]}
    slow = {"p50": 100.0}
    theirs = about | {"who": "flashinfer", "variant": "", "us": slow}
    rows = [theirs, about | {"who": "moecomm", "variant": "fp32 wire"}]
    found = {**result(), "case": case, "rows": rows}
    ((few,),) = plot_results.rows_of(found)
    assert few.dots == {"FlashInfer": {0: 2.5}}
    assert few.cases == ["dispatch and combine in FP8, a batch for each expert (40.0 us)"]
    (axes,) = plot.figure_of([found]).axes
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[1, 1], [2.5]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["FlashInfer", "moecomm"]


BENCHMARKS = {path: json.loads(path.read_text()).get("benchmark") for path in sorted(RESULTS.glob("*.json"))}
DRAWN = [path for path, benchmark in BENCHMARKS.items() if benchmark in plot.DRAWN]


def test_there_are_results_of_each_kind_that_is_drawn() -> None:
    """But for `latency`, of which no page has one."""
    assert {BENCHMARKS[path] for path in DRAWN} == set(plot.DRAWN) - {"latency"}


ONE_OF_EACH = {BENCHMARKS[path]: path for path in DRAWN}.values()


@pytest.mark.parametrize("path", few(DRAWN, *ONE_OF_EACH), ids=lambda path: path.stem)
def test_lines_are_few_differ_in_looks_and_have_labels_that_do_not_touch(path: Path) -> None:
    from matplotlib.text import Text

    figure = plot.figure_of([json.loads(path.read_text())])
    figure.draw_without_rendering()
    for row in plot_results.rows_of(json.loads(path.read_text())):
        for panel in row:
            if isinstance(panel, plot_panels.Panel):
                looks = {(line.color, line.dashes) for line in panel.lines}
                labels = {line.label for line in panel.lines}
                assert 0 < len(panel.lines) == len(looks) == len(labels) <= plot_panels.MOST_LINES
    for axes in figure.axes:
        boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()]  # without its line
        assert not any(one.overlaps(other) for nth, one in enumerate(boxes) for other in boxes[:nth])
        assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes), "a label is cut"
        assert axes.get_window_extent().width > 0.25 * figure.bbox.width / 3
