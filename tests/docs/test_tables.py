"""Generated tables show times of the results that they cite, and some cells are looked up by hand.

tests/test_readme.py compares the pages with what their generators write.  This reads pages and results alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results"
STUDY = "docs/maintainers/all_gather_matmul_study.md"
WAITING = {"docs/batch_invariance.md": "rows-wire"}  # pages whose generated part is empty without results of a kind
BLOCKS = (
    "README.md",
    STUDY,
    "docs/overlap.md",
    "docs/backends.md",
    "docs/weight_transfer.md",
    *(page for page, kind in WAITING.items() if list(RESULTS.glob(f"{kind}-*.json"))),
)  # pages with a generated part
MEASUREMENTS, CALLS, CHECKS, WIDE, DLRM = (
    "docs/measurements.md",
    *(f"docs/maintainers/{name}.md" for name in ("measured_calls", "measured_checks", "wide_ep", "dlrm")),
)
PAGES = (*BLOCKS, MEASUREMENTS, CALLS, CHECKS, WIDE, DLRM)
GENERATED = re.compile(r"<!-- figures: .*?-->(.*?)<!-- end of figures -->", re.DOTALL)
TIME = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?) (us|ms)\b")

Result = dict[str, Any]


class Table(NamedTuple):
    """A table of a page, and the results that the page cites behind it."""

    heads: list[str]
    rows: list[list[str]]
    results: list[Result]


@cache
def result(name: str) -> Result:
    found: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return found | {"name": name}


def tables(page: str) -> list[Table]:
    text = (ROOT / page).read_text()
    if page in BLOCKS:
        (text,) = GENERATED.findall(text)
    return tables_of(text)


def tables_of(text: str) -> list[Table]:
    """Return the tables of a page that has this text."""
    found = []
    for run in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heads, _, *cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in run[0].splitlines()]
        # The first paragraph behind the table that names results.
        cited = next(filter(None, (re.findall(r"results/([\w-]+)\.json", p) for p in text[run.end() :].split("\n\n"))))
        found.append(Table(heads, cells, [result(name) for name in dict.fromkeys(cited)]))
    return found


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield float(value)


def strange(table: Table) -> list[str]:
    """Return the times of a table that are no number of its results, in us or ms, rounded as they are shown."""
    known, scales = set(numbers(table.results)), {"us": (1, 1e-3), "ms": (1, 1e3)}
    return [
        f"{' | '.join(row)}: {digits} {unit}"
        for row in table.rows
        for digits, unit in (time for cell in row for time in TIME.findall(cell))
        if not any(shows(digits, value / scale) for value in known for scale in scales[unit])
    ]


def shows(digits: str, value: float) -> bool:
    """Return whether these digits are the value, rounded."""
    places = len(digits.partition(".")[2])
    return abs(float(digits.replace(",", "")) - value) <= 0.5 * 10**-places * (1 + 1e-6)


@pytest.mark.parametrize("page", PAGES)
def test_times_are_those_of_the_results_that_are_cited(page: str) -> None:
    found = tables(page)
    assert found
    medians = "`moecomm.compat.deep_ep` over our own calls, GPUs"  # of many rows
    assert [one for table in found if table.heads[0] != medians for one in strange(table)] == []


def test_times_of_other_results_are_strange() -> None:
    *_, front = tables("README.md")
    assert len(strange(front._replace(results=[result("peers-h200-2")]))) > len(front.rows)


def test_no_page_of_results_is_left_out() -> None:
    """Generated pages and blocks say so."""
    written = re.compile(r"written by bench/|[Ww]ritten by `python bench/|written with this page")
    pages = [ROOT / "README.md", *ROOT.glob("bench/*.md"), *ROOT.glob("docs/**/*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if written.search(page.read_text())} == {*PAGES, *WAITING}


def row_of(name: str, **named: Any) -> Result:
    (found,) = (row for row in result(name)["rows"] if named.items() <= row.items())
    return dict(found)


def us(name: str, **named: Any) -> float:
    """Return the time of a row: of moecomm with its own choice of blocks, if nothing else is named."""
    default = {"who": "moecomm", "sms_asked": 0} if "who" not in named else {}
    return float(row_of(name, **default, **named)["us"]["p50"])


PEERS = {"tokens": 128, "layout": "flat", "what": "dispatch"}
GATHER = "overlap-all-gather-matmul-h100-2"
LAYER: dict[str, Any] = {"who": "moecomm", "what": "layer", "tokens": 128}


def cells() -> Iterator[tuple[str, str, str, list[float]]]:
    """Yield page, beginning of a row, head, and the numbers of that cell, for a cell of most kinds of tables."""
    ours = us("peers-h200-4", **PEERS, payload="bf16", variant="")
    beside = [row for row in result("peers-h200-4")["rows"] if (PEERS | {"payload": "bf16"}).items() <= row.items()]
    others = [row["us"]["p50"] for row in beside if row["who"].startswith(("deep_ep", "nccl_ep", "flashinfer"))]
    yield "README.md", "128 | dispatch in FP8 |", "moecomm", [us("peers-h200-4", **PEERS, payload="fp8", variant="")]
    yield MEASUREMENTS, "4 H200s | 128 | `flat` | dispatch, bf16", "fastest of these over moecomm", [min(others) / ours]
    many = {"tokens": 4096, "layout": "flat", "payload": "", "what": "combine"}
    inside = row_of("times-many-h200-4", **many, who="moecomm", sms_asked=0, variant="y in the window")
    yield MEASUREMENTS, "deepseek-v3 | 4 | `flat` | 4096", "combine", [inside["us"]["p50"], inside["of_wire"]]
    zipf, even = (us(f"{kind}-h200-4", **PEERS | {"tokens": 4096}, payload="bf16") for kind in ("zipf", "times-many"))
    yield MEASUREMENTS, "`flat` | dispatch, bf16 | 4", "ratio", [zipf / even]
    layers = "moe-deepseek-v3-h100-4"
    two = [row_of(layers, **LAYER, variant=variant)["us"]["p50"] for variant in ("sequential", "one launch")]
    yield MEASUREMENTS, "4 H100s | deepseek-v3 | 128", "unfused", two[:1]
    products = us(layers, who="moecomm", what="GEMMs", variant="", tokens=128)
    yield MEASUREMENTS, "4 H100s | deepseek-v3 | 128", "over GEMMs alone", [min(two) / products]
    rounds = row_of("times-few-h100-4", **PEERS | {"tokens": 1}, payload="bf16", who="moecomm", sms_asked=0)
    yield CALLS, "4 H100s | 1 | moecomm, `flat` | dispatch, bf16", "p99", [rounds["alone_us"]["p99"]]
    yield CALLS, "4 H100s | 1 | moecomm, `flat` | dispatch, bf16", "host", [rounds["host_us"]]
    counted = row_of("counters-h100-4", tokens=1, layout="flat")
    yield CHECKS, "1 | `flat` | 10", "with / without", [counted["on_by_off"]]
    cases = [row["random_cases"] for row in result("random-cases-h200-4")["rows"]]
    yield CHECKS, "`random-cases-h200-4` | random cases", "number, none failed", [sum(cases)]
    squares = {"case": "1024^3", "dtype": "fp16", "who": "moecomm"}
    yield STUDY, "fp16 | 1024", "8: one kernel, TFLOP/s", [2 * 1024**3 / 1e6 / us(GATHER, **squares)]
    gathers = [row for row in result(GATHER)["rows"] if row["dtype"] != "fp8" and "us" in row]
    of = {(row["case"], row["dtype"], row["who"]): row["us"]["p50"] for row in gathers}
    ratios = [time / of[case, dtype, "moecomm"] for (case, dtype, who), time in of.items() if who == "nccl"]
    yield "docs/overlap.md", "`all_gather_matmul` |", "over NCCL", [min(ratios), max(ratios)]
    nic = {"what": "dispatch", "layout": "flat", "payload": "bf16", "tokens": 4096, "sms_asked": 32, "who": "moecomm"}
    sent, gbs = row_of("nic-h100-2", **nic), float(result("nic-h100-2")["case"]["nic"].split(",")[0])
    shares = [sent["across_bytes"] / gbs / sent["us"]["p50"] / 1e3]
    yield "docs/backends.md", "1 H100 |", "dispatch, `flat`", shares
    apart = row_of("transfer-cpu", sets="apart", cast="fp8")
    yield "docs/weight_transfer.md", '2 CPU ranks | `"fp8"` |', "apart: over bytes alone", [apart["of_bytes"]]
    for path in RESULTS.glob("rows-wire-*.json"):
        alike = {"model": "qwen3-30b-a3b", "tokens": 128, "what": "combine", "who": "moecomm"}
        sums, rows = (row_of(path.stem, **alike, variant=variant)["us"]["p50"] for variant in ("", "rows wire"))
        yield "docs/batch_invariance.md", "1 H200 | qwen3-30b-a3b | 128 |", "`combine`", [rows / sums]
    yield WIDE, "8 | 128, decode", "mean ranks per token", [result("wide-ep")["rows"][0]["ranks_wanted"]]
    of_one = {"model": "deepseek-v3", "gemm": 2, "tokens": 64}
    both = [row_of("gemm-packed-mxfp4-h200", **of_one, dtype=dtype) for dtype in ("packed-mxfp4", "fp8")]
    packed, fp8 = (row["us"][row["chosen"]] for row in both)
    yield MEASUREMENTS, "deepseek-v3 | 2 | 16 |", "over FP8", [packed / fp8]
    forms = result("dlrm")["rows"][0]["forms"]
    yield DLRM, "2 |", "saving", [100 * (1 - forms["fused"]["us"] / forms["unfused"]["us"])]


def test_some_cells_are_what_the_results_say() -> None:
    seen = set()
    for page, begin, head, want in cells():
        seen.add(page)
        shown = [
            row[table.heads.index(head)]
            for table in tables(page)
            for row in table.rows
            if head in table.heads and " | ".join(row).replace(" †", "").startswith(begin)
        ]
        assert len(shown) == 1, (page, begin, shown)
        digits = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", shown[0])
        assert all(map(shows, digits, want)) and len(digits) == len(want), (page, begin, head, shown, want)
    assert seen == set(PAGES)
