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


def test_layers_are_drawn_by_model_and_type_of_weights() -> None:
    found = panels(layers())
    assert [title for title, _ in found] == ["a, bf16 weights"] * 2 + ["b, bf16 weights"] * 2
    assert lines(found["b, bf16 weights", "us"]) == {
        "GEMMs alone": [(4, 80), (16, 320)],
        "moecomm two launches": [(4, 80), (16, 320)],
    }
    assert lines(found["b, bf16 weights", "time / GEMMs alone"]) == {
        "GEMMs alone": [(4, 1), (16, 1)],
        "moecomm two launches": [(4, 1), (16, 4)],
    }


def gemms() -> dict[str, Any]:
    rows = []
    for model, us in (("a", 10.0), ("b", 20.0)):
        for tokens in (16, 4):
            about = {"model": model, "ranks": 4, "tokens": tokens, "gemm": 1, "activation": "swiglu", "dtype": "bf16"}
            times = {"64x8c1": us * tokens, "128x6c1": 99.0 * tokens, "apart": 77.0, "torch": 2 * us * tokens}
            rows.append({**about, "chosen": "64x8c1", "us": times, "tflops": 600.0})
    return {"benchmark": "gemm", "device": "cpu", "machine": {"gpus": [], "cpu": "a CPU"}, "rows": rows}


def test_gemms_are_drawn_by_model_and_ranks_with_the_chosen_schedule() -> None:
    found = panels(gemms())
    assert [title for title, _ in found] == ["a, 4 ranks: GEMM 1, swiglu", "b, 4 ranks: GEMM 1, swiglu"]
    for panel in found.values():
        assert lines(panel) == {"moecomm": [(4, 600), (16, 600)], "torch": [(4, 300), (16, 300)]}


def test_links_are_drawn_over_bytes_by_method() -> None:
    rows = [
        {"backend": "gin", "domain_ranks": 0, "bytes": size, "method": method, "us": {"p50": us}, "gbs": size / us}
        for method, us in (("put", 2.0), ("put, a warp", 1.0))
        for size in (64, 4)
    ]
    measured = {"benchmark": "latency", "machine": {"gpus": [], "cpu": "a CPU"}, "rows": [*rows, {"method": "put"}]}
    found = {key: lines(panel) for key, panel in panels(measured).items()}
    assert found["put + signal by a warp", "us"] == {"put, a warp": [(4, 1), (64, 1)]}
    assert found["put + signal by other means", "GB/s"] == {"put": [(4, 2), (64, 32)]}
    assert plot_results.about(measured) == "a CPU"


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


def test_operators_are_drawn_by_case_over_our_fused_kernel() -> None:
    (products,), (bags,) = plot_results.rows_of(operators())
    cases = ["small, bf16", "large, bf16", "small, fp16", "large, fp16"]
    assert products.cases == [f"{case} ({'10.0' if 'small' in case else '80.0'} us)" for case in cases]
    assert products.dots == {
        "computation and NCCL": dict.fromkeys(range(4), 2.0),
        "computation alone": dict.fromkeys(range(4), 0.5),
    }
    assert bags.dots["computation and NCCL"] == {0: 2.0}, "only the case that NCCL has, in its place"
    assert (products.title, plot_results.about(operators())) == ("matmul_all_reduce", "2 ranks, a CPU")


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


def test_rounds_are_drawn_over_tokens_or_where_there_is_one_size_over_domains() -> None:
    over_tokens = panels(domains())["flat, dispatch, fp8", "us"]
    assert lines(over_tokens) == {
        f"{count} domains": [(128, us * 128), (4096, us * 4096)] for count, us in ((1, 100.0), (2, 400.0), (4, 300.0))
    }
    one = domains()
    one["rows"] = [row for row in one["rows"] if row["tokens"] == 4096]
    found = panels(one)
    times = [(1, 100.0 * 4096), (2, 400.0 * 4096), (4, 300.0 * 4096)]
    assert lines(found["flat, dispatch, fp8", "us"]) == {"lsa": times}
    assert lines(found["flat, dispatch, fp8", "GB/s between domains"]) == {"lsa": [(1, 0), (2, 20), (4, 10)]}


def test_predictions_are_drawn_over_gpus_by_number_of_tokens() -> None:
    part, layer = {"us": 10.0, "slow_bytes": 500e3}, {"serial_us": 40.0, "overlapped_us": 30.0, "gemm_us": 20.0}
    about = {"tokens": 8, "layer": layer, "dispatch": part, "combine": {**part, "us": 20.0}}
    rows = [{**about, "gpus": 8 * count} for count in (2, 1)]
    case, inputs = {"ranks": 8, "model": ""}, {"nic": {"gbs": 50.0}}
    found = {"benchmark": "simulate", "case": case, "inputs": inputs, "rows": rows}
    drawn = {y: lines(panel) for (_, y), panel in panels(found).items()}
    assert drawn == {
        "us of a round": {"dispatch": [(8, 10), (16, 10)], "combine": [(8, 20), (16, 20)]},
        "us of a layer": {
            "unfused": [(8, 40), (16, 40)],
            "overlapped": [(8, 30), (16, 30)],
            "GEMMs alone": [(8, 20), (16, 20)],
        },
        "GB/s between domains": {"dispatch": [(8, 50), (16, 50)], "combine": [(8, 25), (16, 25)]},
    }


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_times_alone_are_drawn_with_their_spread(mode: str) -> None:
    found = result()
    found["case"]["mode"] = mode
    for row in found["rows"][:-1]:
        row["us"]["p99"] = 99.0
        row["alone_us"] = {"p50": row["us"]["p50"] + 1, "p99": 50.0}
        row |= {"eager_us": {"p50": 7.0, "p99": 8.0}} if mode == "graph" else {}
    found["rows"] = [{**row, "who": "another"} if row["who"] == "nccl" else row for row in found["rows"]]
    _, alone, eager = panels(found).values()
    names = ["moecomm", "another"]
    assert lines(alone) == {name: [(1, 3), (4, 9), (16, 33)] for name in names}
    assert [line.most for line in alone.lines] == [[50.0] * 3] * 2
    times, most = ([7, 7, 7], [8.0] * 3) if mode == "graph" else ([2, 8, 32], [99.0] * 3)
    assert lines(eager) == {name: list(zip((1, 4, 16), times, strict=True)) for name in names}
    assert [line.most for line in eager.lines] == [most] * 2
    axes = plot.figure_of([found]).axes
    assert [len(bars.get_segments()) for bars in axes[1].collections] == [3, 3], "a bar to p99 for each"


def test_more_than_four_lines_are_split_over_panels() -> None:
    some = [plot_panels.Line(str(number), [(1, number)]) for number in range(7)]
    keep = [plot_panels.Line("limit", [(1, 9)], plot_panels.REFERENCE)]
    labels = [[line.label for line in part] for part in plot_panels.split(some, keep)]
    assert labels == [["limit", "0", "1", "2"], ["limit", "3", "4", "5"], ["limit", "6"]]
    assert plot_panels.split([]) == []


BENCHMARKS = {path: json.loads(path.read_text()).get("benchmark") for path in sorted(RESULTS.glob("*.json"))}
DRAWN = [path for path, benchmark in BENCHMARKS.items() if benchmark in plot.DRAWN]


def test_there_are_results_of_each_kind_that_is_drawn() -> None:
    made = {"plan"}  # in tests/simulate/test_plan.py: a prediction that no page has
    assert {BENCHMARKS[path] for path in DRAWN} == set(plot.DRAWN) - made


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
