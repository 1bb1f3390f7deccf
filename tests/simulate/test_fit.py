"""The fit finds what rows were made from, and what the package ships is a fit of the results in the repository."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import random
from pathlib import Path
from typing import Any

import pytest

from moecomm.errors import BadInput
from moecomm.simulate.domain import Line, Load, load, parse
from moecomm.simulate.fit import Point, fit, fit_line, write

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SHIPPED: dict[str, Any] = json.loads((importlib.resources.files("moecomm.simulate") / "h200.json").read_text())


def points(line: Line, sizes: list[int], row_bytes: list[int], noise: float = 0.0, seed: int = 0) -> list[Point]:
    drawn = random.Random(seed)
    loads = [Load(t, t * 2.71 * size, t * 3.61) for t in sizes for size in row_bytes]
    return [Point(one, line.us(one) * (1 + noise * drawn.uniform(-1, 1))) for one in loads]


@pytest.mark.parametrize(("noise", "off"), [(0.0, 1e-6), (0.01, 0.06)])
def test_many_tokens(noise: float, off: float) -> None:
    line = Line(0.0, 21.0, 330.0, 2.5)
    found = fit_line(points(line, [1024, 2048, 4096, 8192, 16384], [7392, 14336], noise), "many")
    assert found.borrowed == ()
    assert found.line.alpha_us == pytest.approx(21, rel=off * 2)
    assert found.line.gbs == pytest.approx(330, rel=off)
    assert found.line.row_ns == pytest.approx(2.5, rel=off * 5)


def test_few_tokens_have_a_floor() -> None:
    line = Line(8.0, 3.0, 250.0, 1.5)
    found = fit_line(points(line, [1, 2, 4, 8, 32, 64, 128, 256, 512], [7392, 14336]), "few").line
    assert (found.floor_us, found.alpha_us, found.gbs, found.row_ns) == pytest.approx((8, 3, 250, 1.5), rel=1e-6)


def test_terms_that_rows_cannot_tell_apart_are_those_of_flat() -> None:
    flat = Line(0.0, 20.0, 330.0, 0.0)
    one_size = fit_line(points(Line(0.0, 20.0, 310.0, 7.0), [4096], [7392, 14336]), "many", flat)
    assert one_size.borrowed == ("alpha_us",)
    assert (one_size.line.gbs, one_size.line.row_ns) == pytest.approx((310, 7), rel=1e-6)
    one_row = fit_line(points(Line(0.0, 20.0, 330.0, 9.0), [4096], [14336]), "many", flat)
    assert one_row.borrowed == ("alpha_us", "gbs")
    assert one_row.line.row_ns == pytest.approx(9, rel=1e-6)
    alone = fit_line(points(flat, [1024, 4096], [14336]), "many")
    assert alone.borrowed == ("row_ns",) and alone.line.row_ns == 0
    assert (alone.line.alpha_us, alone.line.gbs) == pytest.approx((20, 330), rel=1e-6)


def test_no_term_is_below_zero() -> None:
    faster_from_afar = [Point(Load(t, t * 1e4, t * 3.0), us) for t, us in ((1024, 40.0), (2048, 81.0), (4096, 166.0))]
    line = fit_line(faster_from_afar, "many").line
    assert min(line.alpha_us, line.gbs, line.row_ns) >= 0


def test_what_is_shipped_is_the_fit_of_what_it_names() -> None:
    paths = [RESULTS / named["file"] for named in SHIPPED["fitted_to"]]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    again = "run: moecomm simulate fit bench/results/*.json --out moecomm/simulate/h200.json"
    assert sums == [named["sha256"] for named in SHIPPED["fitted_to"]], again
    found = fit([*paths, RESULTS / "backends-domains-h200-4.json"])  # of which no row is fitted to
    for key in ("domain", "ranks", "gemm"):
        assert found[key] == SHIPPED[key], again
    for mine, shipped in zip(found["lines"], SHIPPED["lines"], strict=True):
        for part, value in shipped.items():
            expected = pytest.approx(value, rel=1e-3, abs=1e-3) if isinstance(value, float) else value
            assert mine[part] == expected, again


def test_every_row_has_its_error() -> None:
    assert len(SHIPPED["rows"]) == sum(line["rows"] for line in SHIPPED["lines"])
    for row in SHIPPED["rows"]:
        assert row["error"] == pytest.approx(row["fitted_us"] / row["measured_us"] - 1, abs=1e-3)
    worst = max(abs(row["error"]) for row in SHIPPED["rows"])
    assert worst == max(line["worst_error"] for line in SHIPPED["lines"])


def test_skewed_rows_and_pairs_are_left_for_the_check() -> None:
    with pytest.raises(BadInput, match="results"):
        fit([RESULTS / "skew-h200-4.json", RESULTS / "host_vs_gloo.json"])
    assert "pair" not in {row["what"] for row in SHIPPED["rows"]}


def test_written_and_read_again(tmp_path: Path) -> None:
    write(tmp_path / "again.json", SHIPPED)
    assert json.loads((tmp_path / "again.json").read_text()) == SHIPPED
    assert load(tmp_path / "again.json") == load() == parse(SHIPPED)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"domain": "", "lines": [{}]}'])
def test_other_files_are_no_parameters(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BadInput, match=r"other\.json"):
        load(tmp_path / "other.json")
