"""Plots: what is drawn is what was measured, and an SVG says from what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moecomm.errors import BadInput
from moecomm_bench import (
    plot,
    plot_beside,
    plot_domains,
    plot_gemms,
    plot_layers,
    plot_links,
    plot_looks,
    plot_operators,
    plot_times,
)

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


def test_a_line_is_one_way_over_tokens() -> None:
    lines = plot.series(result())
    assert list(lines) == [("dispatch", "moecomm flat dispatch fp8"), ("dispatch", "nccl flat dispatch fp8")]
    for rows in lines.values():
        assert [(row["tokens"], row["us"]["p50"]) for row in rows] == [(1, 2), (4, 8), (16, 32)]


def test_the_lines_drawn_are_those() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 2)
    plot._draw_times(axes[0], result())
    plot._draw_bandwidths(axes[1], result())
    times = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}
    assert list(times["moecomm flat dispatch fp8"]) == [2, 8, 32]
    assert [list(line.get_ydata()) for line in axes[0].get_lines()][1] == [pytest.approx(1e6 / 300e3)] * 3  # the wire
    speeds = {line.get_label(): list(line.get_ydata()) for line in axes[1].get_lines()}
    assert speeds["nccl flat dispatch fp8"] == [10, 40, 160]
    assert speeds["all-to-all ceiling (TMA write)"] == [300, 300]


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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmark": "simulate"}', '{"benchmark": "gemm", "rows": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    source = tmp_path / "other.json"
    source.write_text(text)
    with pytest.raises(BadInput, match=r"other\.json"):
        plot.draw([source], tmp_path / "a.svg")


def layers() -> dict[str, Any]:
    rows = []
    for model, us in (("a", 10.0), ("b", 20.0)):
        for tokens in (16, 4):
            about = {"model": model, "tokens": tokens, "who": "moecomm"}
            figures = {"us": {"p50": us * tokens}}
            rows.append({**about, "what": "layer", "variant": "two launches", **figures, "of_gemms": tokens / 4})
            rows.append({**about, "what": "GEMMs", "variant": "", **figures})
            rows.append({**about, "what": "dispatch", "variant": "", **figures})
            rows.append({**about, "who": "torch", "what": "layer", "variant": "", "why": "not here"})
    case = {"ranks": 4, "backend": "host", "tokens": [4, 16]}
    return {"benchmark": "moe", "case": case, "machine": {"gpus": [], "cpu": "a CPU"}, "rows": rows}


def test_other_libraries_have_a_bar_where_they_have_a_time() -> None:
    """A library of pairs of few tokens leaves a panel empty."""
    from matplotlib.figure import Figure

    us = {"p50": 40.0, "p99": 41.0}
    about = {"tokens": 128, "layout": "batched", "what": "pair", "payload": "fp8", "us": us, "alone_us": us}
    case = {**result()["case"], "tokens": [128, 4096], "layouts": ["batched"]}
    rows = [{**about, "who": "pplx", "variant": ""}, {**about, "who": "moecomm", "variant": "fp32 wire"}]
    axes = Figure().subplots(1, 2)
    for panel, tokens in zip(axes, case["tokens"], strict=True):
        plot_beside.draw(panel, {**result(), "case": case, "rows": rows}, tokens)
    assert [line.get_label() for line in axes[0].get_lines()] == ["moecomm", "pplx-kernels"]
    assert [bar.get_height() for bar in axes[0].patches] == [40, 40]
    assert not axes[1].patches and not axes[1].get_lines()


def test_layers_are_drawn_by_model(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    assert plot_layers.models(layers()) == ["a", "b"]
    axes = Figure().subplots(1, 2)
    plot_layers.draw_times(axes[0], layers(), "b")
    plot_layers.draw_ratios(axes[1], layers(), "b")
    times = {line.get_label(): list(line.get_ydata()) for line in axes[0].get_lines()}
    assert times == {"moecomm layer two launches": [80, 320], "moecomm GEMMs": [80, 320]}
    assert list(axes[1].get_lines()[0].get_ydata()) == [1, 4] and len(axes[1].get_lines()) == 2
    source = RESULTS / "moe-mixtral-8x7b-h200-2.json"
    plot.draw([source], tmp_path / "a.svg")
    assert plot.digest([source]) in (tmp_path / "a.svg").read_text()


def gemms() -> dict[str, Any]:
    rows = []
    for model, us in (("a", 10.0), ("b", 20.0)):
        for tokens in (16, 4):
            about = {"model": model, "ranks": 4, "tokens": tokens, "gemm": 1, "activation": "swiglu", "dtype": "bf16"}
            times = {"64x8c1": us * tokens, "128x6c1": 99.0 * tokens, "apart": 77.0, "torch": 2 * us * tokens}
            rows.append({**about, "chosen": "64x8c1", "us": times, "tflops": 600.0})
    return {"benchmark": "gemm", "device": "cpu", "machine": {"gpus": [], "cpu": "a CPU"}, "rows": rows}


def test_gemms_are_drawn_by_model_and_ranks(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    assert plot_gemms.parts(gemms()) == [("a", 4), ("b", 4)]
    axes = Figure().subplots(1, 2)
    plot_gemms.draw_times(axes[0], gemms(), ("b", 4))
    plot_gemms.draw_speeds(axes[1], gemms(), ("b", 4))
    times, speeds = ({line.get_label(): list(line.get_ydata()) for line in one.get_lines()} for one in axes)
    assert times == {"moecomm GEMM 1 swiglu bf16": [80, 320], "torch GEMM 1 swiglu bf16": [160, 640]}
    assert speeds == {"moecomm GEMM 1 swiglu bf16": [600, 600], "torch GEMM 1 swiglu bf16": [300, 300]}
    source = RESULTS / "gemm-fp8-h200.json"
    plot.draw([source], tmp_path / "a.svg")
    assert plot.digest([source]) in (tmp_path / "a.svg").read_text()


def test_links_are_drawn_over_bytes_by_backend_and_method() -> None:
    about = {"backend": "gin", "domain_ranks": 0}
    rows = [
        {**about, "bytes": size, "method": method, "us": {"p50": us}, "gbs": size / us / 1e3}
        for method, us in (("put", 2.0), ("put, a warp", 1.0))
        for size in (64, 4)
    ]
    measured = {"benchmark": "latency", "machine": {"gpus": [], "cpu": "a CPU"}, "rows": [*rows, {"method": "put"}]}
    found = plot_links.lines(measured)
    assert {label: [row["bytes"] for row in line] for label, line in found.items()} == {
        "put": [4, 64],
        "put, a warp": [4, 64],
    }
    (row,) = plot.figure_of([measured]).subfigs
    times, speeds = ({str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()} for axes in row.axes)
    assert times == {"put": [2, 2], "put, a warp": [1, 1]}
    assert speeds["put, a warp"] == [pytest.approx(4e-3), pytest.approx(64e-3)]
    assert row.get_suptitle() == "puts, gin, a CPU"


NCCL = "computation and NCCL, sequential"


def operators() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for operator, dtypes in (("matmul_all_reduce", ["bf16", "fp16"]), ("embedding_all_to_all", ["fp32"])):
        for dtype in dtypes:
            for case, us in (("small", 10.0), ("large", 80.0)):
                about = {"operator": operator, "case": case, "dtype": dtype}
                of_libraries = {"moecomm": us, "moecomm 64x8c1": 1.0, "alone": us / 2, "nccl": 2 * us}
                rows += [{**about, "who": who, "us": {"p50": time}} for who, time in of_libraries.items()]
    rows.append({**about, "who": "torch", "why": "not here"})
    rows = [row for row in rows if (row["case"], row["who"], row["dtype"]) != ("large", "nccl", "fp32")]
    rows.append({"operator": "matmul_all_to_all", "case": "", "dtype": "", "who": "", "why": "timed out"})
    return {"benchmark": "overlap", "ranks": 2, "machine": {"gpus": [], "cpu": "a CPU"}, "rows": rows}


def test_operators_are_drawn_by_case_and_over_nccl() -> None:
    assert plot_operators.operators(operators()) == ["matmul_all_reduce", "embedding_all_to_all"]
    products, bags = plot.figure_of([operators()]).subfigs
    times, ratios = (
        {
            str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
            for line in plot_looks.labelled([axes])
        }
        for axes in products.axes
    )
    cases = ["small, bf16", "large, bf16", "small, fp16", "large, fp16"]
    assert [label.get_text() for label in products.axes[0].get_yticklabels()] == cases
    places = [0, 1, 2, 3]
    assert times == {
        "moecomm, fused": ([10, 80, 10, 80], places),
        "computation and NCCL, sequential": ([20, 160, 20, 160], places),
        "computation alone": ([5, 40, 5, 40], places),
    }
    assert ratios == {label: ([x / times[NCCL][0][n] for n, x in enumerate(at)], y) for label, (at, y) in times.items()}
    assert [label.get_text() for label in bags.axes[0].get_yticklabels()] == ["small", "large"]
    (ours,) = (line for line in bags.axes[1].get_lines() if line.get_label() == "moecomm, fused")
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([0.5], [0]), "only the case that NCCL has, in its place"
    assert products.get_suptitle() == "matmul_all_reduce, 2 ranks, a CPU"


def domains() -> dict[str, Any]:
    rows = []
    for near, us in ((0, 100.0), (2, 400.0), (1, 300.0)):
        for tokens in (128, 4096):
            about = {"backend": "lsa", "domain_ranks": near, "tokens": tokens, "layout": "flat", "variant": ""}
            figures = {"us": {"p50": us * tokens}, "across_gbs": near * 10.0, "wire_gbs": 1.0}
            rows += [{**about, "what": what, "payload": "fp8", **figures} for what in ("dispatch", "pair")]
    rows.append({"backend": "gin", "domain_ranks": 4, "tokens": 8192, "why": "not here"})
    case = {"ranks": 4, "model": "m"}
    return {"benchmark": "backends", "case": case, "machine": {"gpus": [], "cpu": "a CPU"}, "rows": rows}


def test_rounds_of_most_tokens_are_drawn_over_the_number_of_domains() -> None:
    assert plot_domains.counts(domains()) == [1, 2, 4]
    points = [(1, 100.0 * 4096, 0.0), (2, 400.0 * 4096, 20.0), (4, 300.0 * 4096, 10.0)]
    assert plot_domains.lines(domains()) == {"lsa flat dispatch fp8": points}
    assert len(plot.figure_of([domains()]).subfigs) == 2
    one = domains()
    one["rows"] = [row for row in one["rows"] if row["domain_ranks"] == 0]
    assert len(plot.figure_of([one]).subfigs) == 1, "nothing to draw over domains"


def test_predictions_are_drawn_over_the_number_of_domains() -> None:
    part = {"us": 10.0, "slow_bytes": 500e3}
    rows = [{"domains": count, "tokens": 8, "dispatch": part, "combine": {**part, "us": 20.0}} for count in (2, 1)]
    found = {"benchmark": "simulate", "case": {"ranks": 8, "model": ""}, "rows": rows}
    lines = {"dispatch": [(1, 10.0, 50.0), (2, 10.0, 50.0)], "combine": [(1, 20.0, 25.0), (2, 20.0, 25.0)]}
    assert plot_domains.lines(found) == lines


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_times_alone_are_drawn_with_their_spread(mode: str) -> None:
    found = result()
    found["case"]["mode"] = mode
    assert plot_times.lines(found, "alone_us") == {} and len(plot.figure_of([found]).subfigs) == 1
    for row in found["rows"][:-1]:
        row["us"]["p99"] = 99.0
        row["alone_us"] = {"p50": row["us"]["p50"] + 1, "p99": 50.0}
        row |= {"eager_us": {"p50": 7.0, "p99": 8.0}} if mode == "graph" else {}
    names = ["moecomm flat dispatch fp8", "nccl flat dispatch fp8"]
    assert plot_times.lines(found, "alone_us") == {name: [(1, 3, 50), (4, 9, 50), (16, 33, 50)] for name in names}
    eager = [(1, 7, 8), (4, 7, 8), (16, 7, 8)] if mode == "graph" else [(1, 2, 99), (4, 8, 99), (16, 32, 99)]
    assert plot_times.lines(found, "eager_us") == dict(zip(names, [eager] * 2, strict=True))
    _, below = plot.figure_of([found]).subfigs
    left, right = below.axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[3, 9, 33]] * 2
    assert [line.get_label() for line in right.get_lines()] == names
    assert [len(bars.get_segments()) for bars in left.collections] == [3, 3], "a bar to p99 for each"


BENCHMARKS = {path: json.loads(path.read_text()).get("benchmark") for path in sorted(RESULTS.glob("*.json"))}
DRAWN = [path for path, benchmark in BENCHMARKS.items() if benchmark in plot.DRAWN]


def test_there_are_results_of_each_kind_that_is_drawn() -> None:
    assert {BENCHMARKS[path] for path in DRAWN} == set(plot.DRAWN)


ONE_OF_EACH = {BENCHMARKS[path]: path for path in DRAWN}.values()


@pytest.mark.parametrize("path", few(DRAWN, *ONE_OF_EACH), ids=lambda path: path.stem)
def test_lines_of_a_row_differ_in_color_or_marker_and_nothing_covers_them(path: Path) -> None:
    figure = plot.figure_of([json.loads(path.read_text())])
    figure.draw_without_rendering()
    for row in figure.subfigs:
        looks: dict[tuple[Any, str], set[str]] = {}
        lines = plot_looks.labelled(row.axes)
        assert lines
        for line in lines:
            looks.setdefault((line.get_color(), str(line.get_marker())), set()).add(str(line.get_label()))
        assert all(len(labels) == 1 for labels in looks.values()), looks
        (legend,) = row.legends
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_tightbbox()) for axes in row.axes)
        outer = row.bbox
        assert outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0, "the legend is cut"
        assert (figure.get_figwidth(), figure.get_figheight()) == (7, 4.5 * len(figure.subfigs))
        assert all(axes.get_window_extent().height > 0.4 * outer.height for axes in row.axes)
