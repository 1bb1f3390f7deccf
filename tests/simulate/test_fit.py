"""The fit finds what rows were made from, and what the package ships is a fit of the results in the repository."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecomm.errors import BadInput
from moecomm_bench.simulate.direct import Crossing, DirectLine
from moecomm_bench.simulate.domain import DomainLoad, Line, Operation, load, parse
from moecomm_bench.simulate.fit import Point, fit, fit_line, write
from moecomm_bench.simulate.fit_direct import DirectPoint, fit_direct
from moecomm_bench.simulate.solve import solve
from moecomm_bench.simulate.virtual import Slope, slopes, word_ns

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SHIPPED: dict[str, Any] = json.loads((importlib.resources.files("moecomm_bench.simulate") / "h200.json").read_text())


def points(line: Line, sizes: list[int], row_bytes: list[int], blocks: list[int], noise: float = 0.0) -> list[Point]:
    drawn = random.Random(0)
    loads = [
        DomainLoad(t, t * 2.71 * size, t * 3.61, size, t * 3.61 * size, count)
        for t in sizes
        for size in row_bytes
        for count in blocks
    ]
    return [Point(one, line.us(one) * (1 + noise * drawn.uniform(-1, 1))) for one in loads]


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.02), (0.01, 0.1)])
def test_terms_are_found(noise: float, off: float) -> None:
    line = Line(0.1, 21.0, 300.0, 120.0, 30.0, 12.0)
    made = points(line, [1024, 2048, 4096, 8192, 16384], [4224, 7392, 14336], [8, 16, 24, 64], noise)
    found = fit_line(made, "many", "combine").line
    assert (found.alpha_us, found.gbs, found.copy_gbs) == pytest.approx((21, 300, 12), rel=off)
    for point in made:
        assert found.us(point.load) == pytest.approx(point.us, rel=off)


def test_a_slope_tells_rows_in_few_blocks() -> None:
    """All points run in 128 blocks, so that they say nothing of few; the slope does."""
    line = Line(5.0, 4.0, 310.0, 700.0, 50.0, 17.0)
    made = points(line, [1, 8, 32, 128], [14336], [128])
    rows = 7 * 3.61
    told = Slope("dispatch", "flat", rows, 2, rows / 2 * (700 + 14336 / 50) / 1e3)
    few = DomainLoad(128, 128 * 2.71 * 14336, 128 * 3.61, 14336, 0.0, 16)
    without = fit_line(made, "few", "dispatch").line.us(few)
    assert fit_line(made, "few", "dispatch", None, [told]).line.us(few) == pytest.approx(line.us(few), rel=0.03)
    assert abs(without / line.us(few) - 1) > 0.05


def test_terms_that_rows_do_not_tell_are_those_of_flat() -> None:
    flat = Line(0.1, 20.0, 330.0, 90.0, 50.0, 20.0)
    found = fit_line(points(flat, [4096], [14336], [128]), "many", "combine", flat).line
    for term in ("alpha_us", "gbs", "row_ns", "block_gbs", "copy_gbs"):
        assert getattr(found, term) == pytest.approx(getattr(flat, term), rel=1e-3)


def test_solve_finds_a_minimum_and_keeps_what_nothing_determines() -> None:
    def errors(terms: Any) -> Any:
        return np.array([(terms[0] - 3.0) * 100])

    assert solve(errors, np.array([1.0, 7.0]), np.array([1.0, 1.0])) == pytest.approx([3.0, 7.0], rel=1e-3)


def test_copies_of_a_dispatch_come_after_the_others() -> None:
    load_ = DomainLoad(4096, 1e8, 4096, 14336, 1e8, 64)
    terms = (0.1, 20.0, 300.0, 50.0, 50.0, 20.0)
    copies = 1e8 / 64 / 20 / 1e3
    after, beside = Line.of("dispatch", terms), Line.of("combine", terms)
    none = DomainLoad(4096, 1e8, 4096, 14336, 0.0, 64)
    assert after.us(load_) == pytest.approx(after.us(none) + copies)
    assert beside.us(none) < beside.us(load_) < after.us(load_)


def test_what_is_shipped_is_the_fit_of_what_it_names() -> None:
    paths = [RESULTS / named["file"] for named in SHIPPED["fitted_to"]]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    again = "run: python bench/refit.py"
    assert sums == [named["sha256"] for named in SHIPPED["fitted_to"]], again
    found = fit([*paths, RESULTS / "backends-domains-h200-4.json"])  # of which no row is fitted to
    for key in ("domain", "ranks", "gemm", "fitted_to"):
        assert found[key] == SHIPPED[key], again
    for key in ("word_ns", "cold_us", "host_us"):
        assert found[key] == pytest.approx(SHIPPED[key], rel=1e-2), again
    both = zip(found["lines"] + found["direct"], SHIPPED["lines"] + SHIPPED["direct"], strict=True)
    for mine, shipped in both:
        for part, value in shipped.items():
            expected = pytest.approx(value, rel=1e-2, abs=1e-3) if isinstance(value, float) else value
            assert mine[part] == expected, again


def test_every_result_that_can_be_is_fitted_to() -> None:
    everything = fit(sorted(RESULTS.glob("*.json")))
    assert everything["fitted_to"] == SHIPPED["fitted_to"], "run: python bench/refit.py"


def test_every_row_has_its_error() -> None:
    cold = 8
    assert len(SHIPPED["rows"]) == sum(line["rows"] for line in SHIPPED["lines"]) > 200 - cold
    for row in SHIPPED["rows"]:
        assert row["error"] == pytest.approx(row["fitted_us"] / row["measured_us"] - 1, abs=1e-3)
    worst = max(abs(row["error"]) for row in SHIPPED["rows"])
    assert worst == max(line["worst_error"] for line in SHIPPED["lines"]) <= 0.2


def test_terms_of_direct_rows_are_found() -> None:
    line = DirectLine(40.0, 600.0, 20.0, 8.0, 0.25)
    operation = Operation("combine", "expert", "bf16 wire")
    loads = [
        Crossing(rows, size, copied, blocks, 0.0, wire, 3.0, 1.0, early=True)
        for rows in (100.0, 400.0)
        for size in (7392.0, 14336.0)
        for copied in (0.0, 1e7)
        for blocks in (16, 32, 64, 128)
        for wire in (5.0, 70.0)
    ]
    gpus = {"H200": 0.0, "H100": 6.0}
    made = [
        DirectPoint("", gpu, operation, "", 128, one, line.us(one) + more)
        for one in loads
        for gpu, more in gpus.items()
    ]
    lines, other_gpu_us = fit_direct(made, "H200")
    found = lines[operation]
    for point in made:
        more = 0.0 if point.machine == "H200" else other_gpu_us
        assert found.us(point.load) + more == pytest.approx(point.us, rel=0.02)
    assert other_gpu_us == pytest.approx(6, rel=0.1)
    assert (found.start_us, found.copy_gbs, found.overlap) == pytest.approx((40, 8, 0.25), rel=0.1)
    assert fit_direct([], "H200") == ({}, 0.0)


def test_direct_rows_are_those_of_todays_kernels() -> None:
    rows = SHIPPED["direct_rows"]
    files = [f"{name}-h100-4.json" for name in ("backends-domains", "domains", "nic")]
    assert {row["file"] for row in rows} == {*files, "domains-h200-4.json", "nic-h200-4.json"}
    assert len(rows) == sum(line["rows"] for line in SHIPPED["direct"]) == 4 + 2 * (24 + 6)
    assert max(abs(row["error"]) for row in rows) == max(line["worst_error"] for line in SHIPPED["direct"]) <= 0.1
    assert "latency-backends-h100-4.json" in {named["file"] for named in SHIPPED["fitted_to"]}, "NVLink as a NIC"


def test_agreement_is_what_virtual_ranks_took() -> None:
    paths = [RESULTS / "virtual-ranks-h200.json", RESULTS / "ll-h200-4.json"]
    found = word_ns(paths)
    assert found["dispatch flat"] * (64 * 320 - 16 * 272) / 1e3 == pytest.approx(43.52 - 16.9, rel=0.2)
    assert found["combine flat"] * (64 - 4) / 1e3 == pytest.approx(12.7 - 5.47, rel=0.3)
    (one,) = [s for s in slopes(paths) if (s.what, round(s.us, 2)) == ("dispatch", 11.97)]  # 4 ranks: 19.68 - 7.71
    assert one.blocks == 2 and one.rows == pytest.approx(7 * 3.6142, rel=1e-3)
    assert slopes(paths[1:]) == []


def test_skewed_rows_and_pairs_are_left_for_the_check() -> None:
    with pytest.raises(BadInput, match="results"):
        fit([RESULTS / "skew-h200-4.json", RESULTS / "host_vs_gloo.json"])
    assert "pair" not in {row["what"] for row in SHIPPED["rows"]}


def test_written_and_read_again(tmp_path: Path) -> None:
    write(tmp_path / "again.json", SHIPPED)
    assert json.loads((tmp_path / "again.json").read_text()) == SHIPPED
    assert load(tmp_path / "again.json") == load() == parse(SHIPPED)
