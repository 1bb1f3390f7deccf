"""Every number of every generated table is what its results say, by code that shares nothing with the generators.

A derivation takes the labels of a row and returns, for each result that they may mean, the numbers of each other cell.
A shown number is right if its last digit is.  The row is right if all its numbers are those of one result.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results"
STUDY = "docs/maintainers/all_gather_matmul_study.md"
BLOCKS = ("README.md", STUDY, "docs/overlap.md", "docs/backends.md")  # pages with a generated part
PAGES = (*BLOCKS, "docs/measurements.md")
PAGES += tuple(f"docs/maintainers/{name}.md" for name in ("measured_calls", "measured_checks", "wide_ep", "dlrm"))
GENERATED = re.compile(r"<!-- figures: .*?-->(.*?)<!-- end of figures -->", re.DOTALL)
UNITS = {"us": 1.0, "ms": 1e3, "GiB": 2.0**30, "%": 0.01}
NUMBER = re.compile(r"(?<![\w.])([+-]?)(\d+(?:,\d{3})*(?:\.\d+)?)(?: ?(us|ms|GiB|%))?(?![\w.]*[A-Za-z_])")

Result = dict[str, Any]
Cells = dict[str, list[float]]  # expected numbers of a cell, by its head; heads that are repeated have #2, #3


class Table(NamedTuple):
    """A table of a page, and the results that the page cites behind it."""

    page: str
    heads: list[str]
    rows: list[list[str]]
    results: list[Result]


Derivation = Callable[[Table, dict[str, str]], Iterable[Cells]]
DERIVATIONS: dict[str, tuple[tuple[str, ...], Derivation]] = {}


def derives(heads: str, labels: str) -> Callable[[Derivation], Derivation]:
    """Register the derivation of tables whose heads begin so.  `labels`: heads, | between them, that choose a row."""

    def register(derivation: Derivation) -> Derivation:
        DERIVATIONS[heads] = tuple(labels.split(" | ")), derivation
        return derivation

    return register


MACHINES = ("4 H100s", "2 H200s", "4 H200s", "8 H200s")  # of tables whose heads name theirs


def of_machines(heads: str, labels: str) -> Callable[[Derivation], Derivation]:
    """Register the derivation of a table whose heads name the machine, {}."""

    def register(derivation: Derivation) -> Derivation:
        for machine in MACHINES:
            derives(heads.format(machine), labels.format(machine))(derivation)
        return derivation

    return register


@cache
def result(name: str) -> Result:
    found: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return found | {"name": name}


def tables(page: str) -> list[Table]:
    text = (ROOT / page).read_text()
    if page in BLOCKS:
        (text,) = GENERATED.findall(text)
    return tables_of(page, text)


def tables_of(page: str, text: str) -> list[Table]:
    """Return the tables of a page that has this text."""
    found = []
    for run in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heads, _, *cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in run[0].splitlines()]
        # The first paragraph behind the table that names results.
        cited = next(filter(None, (re.findall(r"results/([\w-]+)\.json", p) for p in text[run.end() :].split("\n\n"))))
        found.append(Table(page, numbered(heads), cells, [result(name) for name in dict.fromkeys(cited)]))
    return found


def numbered(heads: list[str]) -> list[str]:
    """Return heads without repetitions: the second `p99` is `p99#2`."""
    seen: dict[str, int] = {}
    found = []
    for head in heads:
        seen[head] = seen.get(head, 0) + 1
        found.append(head if seen[head] == 1 else f"{head}#{seen[head]}")
    return found


def wrong(cell: str, expected: list[float]) -> str:
    """Return what a cell shows instead of the expected numbers; empty if it shows them."""
    shown = NUMBER.findall(re.sub(r"\bx(?=\d)", "", cell))  # x1.29 is a ratio
    if len(shown) != len(expected):
        return f"{cell!r} has {len(shown)} numbers, and its result {expected}"
    for (sign, digits, unit), value in zip(shown, expected, strict=True):
        places = len(digits.partition(".")[2])
        scale = UNITS.get(unit, 1.0)
        number = float(sign + digits.replace(",", ""))
        if abs(number - value / scale) > 0.5 * 10**-places * (1 + 1e-6):
            return f"{sign}{digits} {unit} stands for {value:g}"
    return ""


def derivation_of(table: Table) -> tuple[tuple[str, ...], Derivation]:
    known = [found for heads, found in DERIVATIONS.items() if " | ".join(table.heads).startswith(heads)]
    assert len(known) == 1, f"{table.page}: {len(known)} derivations of the table {table.heads}"
    return known[0]


def mistakes(table: Table) -> Iterator[str]:
    """Yield each row that no result has, with what is wrong in comparison with the nearest one."""
    labels, derive = derivation_of(table)
    for row in table.rows:
        cells = dict(zip(table.heads, row, strict=True))
        plain = {head: cell.replace(" †", "") for head, cell in cells.items()}
        best: list[str] | None = None
        for expected in derive(table, plain):
            assert not {*expected} & {*labels}
            of_cells = {head: wrong(cell, expected.get(head, [])) for head, cell in plain.items() if head not in labels}
            told = [f"{head}: {why}" for head, why in of_cells.items() if why]
            best = told if best is None or len(told) < len(best) else best
        if best != []:
            yield f"{table.page}: {' | '.join(row)}: {best or 'no result has such a row'}"


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_table_is_that_of_a_result(page: str) -> None:
    found = tables(page)
    assert found
    assert [mistake for table in found for mistake in mistakes(table)] == []


def test_no_page_of_results_is_left_out() -> None:
    """Generated pages and blocks say so."""
    written = re.compile(r"written by bench/|[Ww]ritten by `python bench/|written with this page")
    pages = [ROOT / "README.md", *ROOT.glob("bench/*.md"), *ROOT.glob("docs/**/*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if written.search(page.read_text())} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_number_is_found(page: str) -> None:
    """In each row of each table: the last digit of a number, off by two."""
    for table in tables(page):
        labels, _ = derivation_of(table)
        for row in table.rows:
            numbers = (at for at, head in enumerate(table.heads) if head not in labels and NUMBER.search(row[at]))
            if (column := next(numbers, None)) is None:
                assert [found["name"] for found in table.results] == ["gpu-tests"], row  # a step without tests
                continue
            changed = [*row[:column], off_by_two(row[column]), *row[column + 1 :]]
            assert list(mistakes(table._replace(rows=[changed]))), f"{page}: {changed} passes in place of {row}"


DTYPE = re.compile(r"\b(bf16|fp16|fp8)\b")


@pytest.mark.parametrize("page", PAGES)
def test_figures_of_another_dtype_are_found(page: str) -> None:
    """A row whose labels name a dtype is wrong with the name of another one, which the table has."""
    for table in tables(page):
        labels, _ = derivation_of(table)
        columns = [at for at, head in enumerate(table.heads) if head in labels]
        named = {dtype for row in table.rows for at in columns for dtype in DTYPE.findall(row[at])}
        for row in table.rows:
            for at, other in product(columns, sorted(named)):
                renamed = DTYPE.sub(other, row[at])
                changed = [*row[:at], renamed, *row[at + 1 :]]
                if changed in table.rows:
                    continue
                with suppress(ValueError):  # no result has a row with these labels
                    assert list(mistakes(table._replace(rows=[changed]))), f"{page}: {changed} passes in place of {row}"


def off_by_two(cell: str) -> str:
    """Return the cell with another last digit of its first number, which it has."""
    found = NUMBER.search(cell)
    assert found
    other = found[2][:-1] + str((int(found[2][-1]) + 2) % 10)
    return cell[: found.start(2)] + other + cell[found.end(2) :]


# Rows of results.


def rows(found: Result, **named: Any) -> list[Result]:
    """Return the rows with times that have these values."""
    return [row for row in found["rows"] if "us" in row and all(row.get(key) == value for key, value in named.items())]


def gpus_of(found: Result) -> str:
    ranks = found.get("case", {}).get("ranks") or found.get("ranks") or len(found["machine"]["gpus"])
    return f"{ranks} {kind_of(found)}s"


def kind_of(found: Result) -> str:
    return "H100" if "H100" in found["machine"]["gpus"][0] else "H200"


def windows(found: Result, tokens: int, layout: str) -> list[float]:
    """Return [the window of a size in a layout], or [] if the result lacks it."""
    return opened([m for m in found["memory"] if m["tokens"] == tokens and m.get("layout", layout) == layout])


def opened(entries: list[dict[str, Any]]) -> list[float]:
    """Return [the largest window] of rows or entries of memory: as it was open, else as a caller opens it; else []."""
    noted = [entry.get("opened", entry.get("opened_bytes", 0)) for entry in entries]
    callers = [entry.get("window", entry.get("window_bytes", 0)) for entry in entries]
    largest = max(noted, default=0) or max(callers, default=0)
    return [largest] if largest else []


def operation(cell: str) -> dict[str, str]:
    """Return what, payload and variant of an operation as tables call it."""
    what, *others = cell.split(", ")
    payload = others[0] if others and what in ("dispatch", "dispatch and combine") else ""
    variant = others[-1] if others and others[-1] != payload else ""
    return {"what": {"dispatch and combine": "pair"}.get(what, what), "payload": payload, "variant": variant}


WHO = {
    "DeepEP V1": ("deep_ep", "deep_ep low-latency"),
    "DeepEP V2": ("deep_ep elastic",),
    "NCCL EP": ("nccl_ep", "nccl_ep expert-major", "nccl_ep low-latency"),
    "FlashInfer": ("flashinfer",),
    "pplx-kernels": ("pplx",),
}


@derives("GPUs | tokens a rank | layout | operation | moecomm", "GPUs | tokens a rank | layout | operation")
def beside(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    tokens, layout, asked = int(cells["tokens a rank"]), cells["layout"].strip("`"), operation(cells["operation"])
    for found in table.results:
        model = found.get("case", {}).get("model", "")
        if f"{gpus_of(found)}{f', {model}' if model != 'deepseek-v3' else ''}" != cells["GPUs"]:
            continue
        same = {"tokens": tokens, "layout": layout, "what": asked["what"], "payload": asked["payload"]}
        ours = rows(found, who="moecomm", **same, variant=asked["variant"])
        if not ours:
            continue
        (of_table,) = (row for row in ours if row["sms_asked"] == 0)
        expected = {"moecomm": shown_of([of_table]), "moecomm, best number of SMs": shown_of(ours)}
        for library, names in WHO.items():
            expected[library] = shown_of([r for r in rows(found, **same) if r["who"] in names])
        theirs = [row for names in WHO.values() for row in rows(found, **same) if row["who"] in names]
        for head, time in (("fastest of these over moecomm", "us"), ("alone", "alone_us"), ("eager", "eager_us")):
            times = [row[time]["p50"] for row in theirs if time in row]
            expected[head] = [min(times) / of_table[time]["p50"]] if times and time in of_table else []
        yield expected | {"window": windows(found, tokens, layout)}


def shown_of(found: list[Result]) -> list[float]:
    """Return the times of the fastest row, with its SMs if it says them; [] without a row."""
    times = sorted((row["us"]["p50"], row["alone_us"]["p50"], row["sms"]) for row in found)
    return [number for number in times[0] if number] if times else []


# Words of the main README: layout, and variant of moecomm.
IN_WORDS = {
    "": ("flat", "y in the window"),
    "registered memory": ("flat", "y in the window"),
    "any tensor": ("flat", "y outside"),
    "rows grouped by expert": ("expert", "bf16 wire"),
    "a batch for each expert": ("batched", "bf16 wire"),
}


@derives("tokens a GPU | operation | moecomm", "tokens a GPU | operation")
def in_words(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    operation, _, words = cells["operation"].partition(", ")
    what, _, payload = operation.partition(" in ")
    layout, variant = IN_WORDS[words]
    what = "pair" if what == "dispatch and combine" else what
    same = {"tokens": int(cells["tokens a GPU"]), "layout": layout, "what": what, "payload": payload.lower()}
    for found in table.results:
        (ours,) = rows(found, who="moecomm", **same, variant="" if what == "dispatch" else variant, sms_asked=0)
        expected = {"moecomm": [ours["us"]["p50"]]}
        for library in table.heads[3:]:
            times = [row["us"]["p50"] for row in rows(found, **same) if row["who"] in WHO[library]]
            reads = words != "any tensor" or library not in ("NCCL EP", "FlashInfer")
            expected[library] = [min(times)] if times and reads else []
        yield expected


@derives(
    "GPUs | tokens a rank | library, layout | operation | alone, p50",
    "GPUs | tokens a rank | library, layout | operation",
)
def calls(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    who, layout, *more = cells["library, layout"].split(", ")
    tokens, layout = int(cells["tokens a rank"]), layout.strip("`")
    for found in table.results:
        case = found["case"]
        routing = case.get("routing")
        named = [] if not routing else [f"Zipf {routing['zipf']}" if "zipf" in routing else "recorded routing"]
        named += [case["model"]] * (case["model"] != "deepseek-v3")
        if gpus_of(found) != cells["GPUs"] or named != more:
            continue
        for row in rows(found, who=who, layout=layout, tokens=tokens, **operation(cells["operation"])):
            if "alone_us" not in row:
                continue
            graph = case["mode"] == "graph"
            eager = row.get("eager_us") if graph else row["us"]
            yield {
                "alone, p50": [row["alone_us"]["p50"]],
                "p90": [row["alone_us"]["p90"]],
                "p99": [row["alone_us"]["p99"]],
                "in a graph": [row["us"]["p50"]] if graph else [],
                "eager": [eager["p50"]] if eager else [],
                "host": [] if row["host_us"] is None else [row["host_us"]],
                "SMs": [row["sms"]] if row["sms"] else [],
                "window": windows(found, tokens, layout) if who == "moecomm" else [],
            }


@derives("layout | operation | even routing", "layout | operation")
def skewed(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    zipf, even = (found for found in table.results if found["name"].startswith(("zipf-", "times-")))
    named = {"who": "moecomm", "layout": cells["layout"].strip("`"), **operation(cells["operation"])}
    (tokens,) = zipf["case"]["tokens"]
    for one, other in product(rows(zipf, **named, tokens=tokens), rows(even, **named, tokens=tokens)):
        times = [row["us"]["p50"] for row in (other, one)]
        yield {
            "even routing": times[:1],
            f"Zipf {zipf['case']['routing']['zipf']}": times[1:],
            "ratio": [times[1] / times[0]],
            "window": windows(zipf, tokens, named["layout"]),
        }


@derives("GPUs | model | tokens a rank | unfused", "GPUs | model | tokens a rank")
def layers(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    named = {"model": cells["model"], "tokens": int(cells["tokens a rank"])}
    for found in table.results:
        if found.get("benchmark") != "moe" or gpus_of(found) != cells["GPUs"] or not rows(found, **named):
            continue
        ours = {row["variant"]: row for row in rows(found, who="moecomm", what="layer", **named)}
        three = [ours[variant] for variant in ("sequential", "one launch", "fp8, one launch")]
        times = [row["us"]["p50"] for row in three]
        best = min(times[:2])
        (products,) = rows(found, who="moecomm", what="GEMMs", variant="", **named)
        others = [row["us"]["p50"] for row in rows(found, who="torch", what="layer", **named)]
        yield {
            "unfused": times[:1],
            "fused": times[1:2],
            "default (sustained)": [
                time for row in [ours.get("default")] if row for time in (row["us"]["p50"], row["sustained_us"])
            ],
            "over GEMMs alone": [best / products["us"]["p50"]],
            "torch's over it": [min(others) / best],
            "fused, FP8 weights": times[2:],
            "window": opened(three),
        }


# Topics of docs/measurements.md.

ROUNDS = ("model | GPUs | layout | tokens a rank", "model | GPUs | layout | tokens a rank")


def timed(row: Result) -> list[float]:
    """Return the numbers of a cell: time, and share of the wire if there is one."""
    return [row["us"]["p50"], *([] if row.get("of_wire") is None else [row["of_wire"]])]


def cell_of(found: Result, **named: Any) -> list[float]:
    """Return the numbers of a cell of moecomm's rounds; [] if the result lacks the row."""
    named = {"who": "moecomm", "variant": "", "sms_asked": 0, **named}
    return next((timed(row) for row in rows(found, **named)), [])


@derives(*ROUNDS)
def rounds(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    model, *how = cells["model"].split(", ")
    tokens, layout = int(cells["tokens a rank"]), cells["layout"].strip("`")
    for found in table.results:
        case = found.get("case", {})
        there = ["H100s"] * (kind_of(found) == "H100") + ["caches flushed"] * bool(case.get("cold"))
        if (case.get("model"), str(case.get("ranks")), there) != (model, cells["GPUs"], how):
            continue
        if found.get("benchmark") != "dispatch-combine" or case["skew"] or case.get("routing"):
            continue
        same = {"tokens": tokens, "layout": layout}
        expected = {
            f"dispatch, {shown}": cell_of(found, what="dispatch", payload=payload, **same)
            for shown, payload in (("bf16", "bf16"), ("FP8", "fp8"))
        }
        for head in ("combine", "combine#2"):
            variant = cells[head].partition(", ")[2]
            expected[head] = cell_of(found, what="combine", variant=variant, **same)
        yield expected | {"window": windows(found, tokens, layout)}


@derives("1 token, 2 blocks", "1 token, 2 blocks: dispatch of the last of so many ranks on one GPU")
def virtual(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    layout = next(iter(cells.values())).strip("`")
    for found in table.results:
        named = {"tokens": 1, "blocks": 2, "what": "dispatch", "layout": layout}
        yield {str(row["ranks"]): [row["us"]] for row in rows(found, **named)}


@derives("GEMM | tokens | bf16", "GEMM | tokens")
def products(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    gemm, _, activation = cells["GEMM"].partition(", ")
    for found in table.results:
        named = {"tokens": int(cells["tokens"]), "gemm": int(gemm), "activation": activation or None}
        of = {
            dtype: [
                row
                for row in rows(found, dtype=dtype, tokens=named["tokens"], gemm=named["gemm"])
                if (row["activation"] or None) == named["activation"] and "chosen" in row
            ]
            for dtype in ("bf16", "fp8")
        }
        for one, eight in product(of["bf16"], of["fp8"]):
            times = [row["us"][row["chosen"]] for row in (one, eight)]
            yield {
                "bf16": times[:1],
                "TFLOP/s": [one["tflops"]],
                "FP8": times[1:],
                "TFLOP/s#2": [eight["tflops"]],
                "torch's bf16 over bf16": [one["us"]["torch"] / times[0]],
                "bf16 over FP8": [times[0] / times[1]],
            }


ONE_SIZE = {"dispatch, bf16": ("dispatch", "bf16", ""), "dispatch, FP8": ("dispatch", "fp8", "")}
ONE_SIZE |= {f"combine, {variant}": ("combine", "", variant) for variant in ("y in the window", "y outside")}


@derives("layout | combine, 128", "layout")
def sums_in_fp8(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    layout, expected = cells["layout"].strip("`"), Cells()
    for tokens, over in ((128, "FP8 over it"), (8192, "FP8 over it#2")):
        times = [
            row["us"]["p50"]
            for variant in (("y outside" if layout == "flat" else "bf16 wire"), "fp8 wire", "int8 wire")
            for row in rows(table.results[0], what="combine", tokens=tokens, layout=layout, variant=variant)
        ]
        expected |= {f"combine, {tokens}": times[:1], f"in FP8, {tokens}": times[1:2], f"in INT8, {tokens}": times[2:]}
        expected |= {over: [times[1] / times[0]]}
    yield expected


@derives("layer | routing", "layer | routing")
def placed_layers(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    zipf = float(cells["routing"].removeprefix("Zipf "))
    (placed,) = (one for one in table.results if one["name"].startswith("placed-layers"))
    found = {row["placed"]: row for row in rows(placed, what="layer", model=cells["layer"].split(",")[0], zipf=zipf)}
    even = rows(placed, what="layer", model=cells["layer"].split(",")[0], zipf=0.0)[0]["us"]["p50"]
    names = {"experts in a row": "", "placed, `token`": "token", "placed, `nearest`": "nearest"}
    names |= {"copied in the call": "replicate"} if "replicate" in found else {}
    times = {head: found[name]["us"]["p50"] for head, name in names.items()}
    expected = Cells({head: [us] for head, us in times.items()})
    expected |= {
        f"over even{'#' * bool(nth)}{nth + 1 if nth else ''}": [us / even] for nth, us in enumerate(times.values())
    }
    expected |= {"busiest": [found[""]["busiest"]], "busiest, placed": [found["token"]["busiest"]]}
    yield expected | ({"busiest, copied": [found["replicate"]["busiest"]]} if "replicate" in found else {})


@derives("dispatch | layout | tokens", "dispatch | layout | tokens")
def placed_dispatches(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    about = {
        "model": cells["dispatch"].split(",")[0],
        "layout": cells["layout"].strip("`"),
        "tokens": int(cells["tokens"]),
    }
    (placed,) = (one for one in table.results if one["name"].startswith("placed-layers"))
    found = {row["placed"]: row["us"]["p50"] for row in rows(placed, what="dispatch", **about)}
    names = {"experts in a row": ""} | {f"replicas, `{name}`": name for name in ("token", "nearest", "balanced")}
    yield Cells({head: [found[name]] for head, name in names.items() if name in found})


@derives("weights that move", "weights that move")
def moving_weights(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = (one for one in table.results if one["name"].startswith("moving-weights"))
    what, *others = re.findall(r"[a-z]+|\d+", cells["weights that move"])
    numbers = [int(word) for word in others if word.isdigit()]
    for row in found["rows"]:
        if what == "a" and row["what"] == "copies" and [row["held"]] == numbers:
            yield {"copies alone": [row["gbs"]]}
        if what == row["what"] == "rounds" and [row["tokens"]] == numbers:
            yield {"alone": [row["us"]], "beside copies": [row["beside_us"]]}
        if what == row["what"] == "steps" and [row["layers"], row["tokens"]] == numbers:
            yield {"alone": [1e3 * row["quiet"]["p50"]], "beside copies": [1e3 * row["moving"]["p50"]]}


@derives("rows | wire | loss", "rows | wire")
def accuracy(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for row in table.results[0]["rows"]:
        if [row["format"], row["wire"]] == [cells["rows"], cells["wire"]]:
            yield {head: [row[head.replace("another byte", "other_byte")]] for head in table.heads[2:]}


@derives("model | policy | no replicas", "model | policy")
def plans(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    key = {"`eplb`": "eplb", "`spread`": "spread", "`spread` for nearest": "nearest"}[cells["policy"]]
    for row in table.results[0]["rows"]:
        if cells["model"] == f"{row['model']}, Zipf {row['zipf']}":
            heads = {"even choice": "even", "nearest": "nearest", "rows to other nodes": "crossing"}
            yield {
                "no replicas": [row["none"]],
                **{head: [row[key][name]] for head, name in heads.items()},
                "time": [row[key]["ms"] * 1e3],
            }


@derives("model, later | kept", "model, later")
def changed_plans(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for row in table.results[0]["rows"]:
        if cells["model, later"] == f"{row['model']}, Zipf {row['zipf']}":
            yield {
                "kept": [row["kept"]],
                **{f"{budget['copies']} copies a layer": [budget["even"]] for budget in row["budgets"]},
                "renumbered": [row["renumbered"]["even"]],
                "copies a layer": [row["renumbered"]["made"]],
                "`eplb`": [row["anew"]["even"]],
                "copies a layer#2": [row["anew"]["made"]],
                "longest time": [max(budget["ms"] for budget in row["budgets"]) * 1e3],
            }


@derives("payload | layout | rows given", "payload | layout")
def formats_of_rows(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    found = table.results[0]
    named, payload = {"layout": cells["layout"].strip("`"), "what": "dispatch"}, cells["payload"]
    expected: Cells = {}
    for number, tokens in enumerate((128, 8192), 1):
        (base,) = rows(found, tokens=tokens, payload="bf16", **named)
        for at, (head, suffix) in enumerate((("rows given", "-given"), ("sent as bf16, cast", "")), 2 * number - 1):
            over = "over bf16" if at == 1 else f"over bf16#{at}"
            for row in rows(found, tokens=tokens, payload=payload + suffix, **named):
                p50 = row["us"]["p50"]
                expected |= {f"{head}, {tokens}": [p50], over: [p50 / base["us"]["p50"]]}
    yield expected


@derives("blocks | dispatch, bf16", "blocks")
def few_blocks(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    sms = 0 if cells["blocks"] == "default" else int(cells["blocks"])
    few, fast = (
        next(found for found in table.results if found["name"].startswith(name)) for name in ("few-sms", "ht-")
    )
    named = {"tokens": 4096, "layout": "flat", "sms_asked": sms}
    yield {
        head: cell_of(fast if payload == "fp8" else few, what=what, payload=payload, variant=variant, **named)
        for head, (what, payload, variant) in ONE_SIZE.items()
    } | {"window": windows(few, 4096, "flat")}


@derives("routing | dispatch, bf16", "routing")
def routing(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        skew = found["case"]["skew"]
        if cells["routing"] != (f"{skew:.0%} of the tokens want one rank" if skew else "even"):
            continue
        yield {
            head: cell_of(found, what=what, payload=payload, variant=variant, tokens=4096, layout="flat")
            for head, (what, payload, variant) in ONE_SIZE.items()
        } | {"window": windows(found, 4096, "flat")}


@of_machines("model, {}, 8192 tokens", "model, {}, 8192 tokens | weights")
def at_work(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    head, weights = table.heads[0], cells["weights"]
    model, machine = cells[head], head.split(", ")[1]
    for found in table.results:
        if not found["name"].startswith("at-work") or gpus_of(found) != machine:
            continue
        of = {row["what"]: row for row in rows(found, model=model, tokens=8192, dtype=weights)}
        if not of:
            continue
        best = min((row for what, row in of.items() if what.startswith("turns")), key=lambda row: row["at_work_us"])
        yield {
            "GEMMs": [of["GEMMs"]["at_work_us"]],
            "one after the other": [of["one after the other"]["at_work_us"]],
            "fused, best order": [best["at_work_us"]],
            "clock, power": [best["mhz"], best["watts"]],
        }


@derives("through | domains", "through | domains")
def backends(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    through, _, nic = cells["through"].partition(", NIC of ")
    domains, where, *sms = cells["domains"].split(", ")
    each, kind = where.removesuffix(" each").replace("one ", "1 ").split()
    for found in table.results:
        case = found.get("case")
        if case is None or kind_of(found) != kind.rstrip("s") or case.get("nic", "") != nic.strip("`"):
            continue
        asked = int(sms[0].removesuffix(" SMs")) if sms else 0
        for of_domain in {row.get("domain_ranks", case.get("domain_ranks")) for row in rows(found)}:
            there = case["ranks"] // (of_domain or case["ranks"]), of_domain or case["ranks"]
            mine = [
                row
                for row in rows(found, who="moecomm", layout="flat")
                if row.get("through", found.get("backend", "").split(",")[0]) == through.strip("`")
                and row.get("domain_ranks", of_domain) == of_domain
            ]
            if there != (int(domains), int(each)) or not mine:
                continue
            for sms_asked in {asked, 0} if asked and asked not in case["sms"] else {asked}:
                yield _through(found, mine, sms_asked)


def _through(found: Result, mine: list[Result], sms: int) -> Cells:
    def time(what: str, tokens: int) -> list[float]:
        named = {"what": what, "tokens": tokens, "sms_asked": sms}
        named |= {"payload": "bf16"} if what == "dispatch" else {"variant": "y in the window"}
        return next((timed(row) for row in mine if named.items() <= row.items()), [])

    heads = ("dispatch of 128 tokens, bf16", "of 4096", "combine of 128", "of 4096#2")
    asked = [(what, tokens) for what in ("dispatch", "combine") for tokens in (128, 4096)]
    times = {head: time(*one) for head, one in zip(heads, asked, strict=True)}
    return times | {"window": opened(found.get("memory", mine))}


@derives("put + signal, bytes", "put + signal, bytes")
def put_and_signal(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    nbytes = int(cells["put + signal, bytes"])
    of = {found["name"]: rows(found, bytes=nbytes) for found in table.results if found["name"].startswith("latency")}
    heads = {"`lsa`": "lsa", "`nvshmem`": "nvshmem", "`gin`, proxy on one host": "gin"}
    (here,) = (some for name, some in of.items() if name.startswith("latency-backends") and measured(name, table))
    found = {head: [r["us"]["p50"] for r in here if r["backend"] == name][:1] for head, name in heads.items()}
    if (head := "`gin`, TCP over 127.0.0.1, 2 GPUs") in table.heads:
        over_tcp = [*of["latency-gin-tcp-h200-2"], *of["latency-gin-tcp-h100-2"]]
        found[head] = [over_tcp[0]["us"]["p50"]]
    yield found


def measured(name: str, table: Table) -> bool:
    """Return True for the only such result, and of several for the one of H100s, which is the one that is shown."""
    return name.endswith("h100-4") or f"{name.rpartition('-')[0][:-4]}h100-4" not in {r["name"] for r in table.results}


@derives("H200s | dispatch, FP8 | combine", "H200s")
def concurrent(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        if not found["name"].startswith("beside") or gpus_of(found) != f"{cells['H200s']} H200s":
            continue
        expected: Cells = {"window": windows(found, 4096, "flat")}
        for head, (what, payload, variant) in ONE_SIZE.items():
            for row in rows(found, what=what, payload=payload, variant=variant, tokens=4096, layout="flat"):
                if head in cells:
                    expected[head] = [row["us"]["p50"], row["overlap"]["kept"], row["overlap"]["held"]]
        yield expected


@of_machines("{}, time over that of our fused kernel", "{}, time over that of our fused kernel")
def operators(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    who = next(iter(cells.values()))
    expected: Cells = {}
    for found in table.results:
        if not found["name"].startswith("overlap-") or gpus_of(found) != table.heads[0].split(", ")[0]:
            continue
        ratios: dict[bool, list[float]] = {}
        for row in rows(found, who=who):
            (ours,) = rows(found, who="moecomm", case=row["case"], dtype=row["dtype"])
            ratios.setdefault(row["dtype"] == "fp8", []).append(row["us"]["p50"] / ours["us"]["p50"])
        ranges = [bound for fp8 in (False, True) if fp8 in ratios for bound in (min(ratios[fp8]), max(ratios[fp8]))]
        expected[f"`{found['rows'][0]['operator']}`"] = ranges
    yield expected


@derives("layout | tokens a rank | dispatch, bf16 | NCCL", "layout | tokens a rank")
def beside_nccl(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    layout, variant = cells["layout"].split(", ")
    named = {"layout": layout.strip("`"), "tokens": int(cells["tokens a rank"])}
    for found in table.results:
        if re.fullmatch(r"peers-h200-[48]", found["name"]) is None:
            continue
        times = [
            [row["us"]["p50"] for row in rows(found, **named, **one)]
            for one in (
                {"who": "moecomm", "what": "dispatch", "payload": "bf16", "sms_asked": 0},
                {"who": "nccl", "what": "dispatch", "payload": "bf16"},
                {"who": "moecomm", "what": "combine", "variant": variant, "sms_asked": 0},
                {"who": "nccl", "what": "combine"},
            )
        ]
        heads = ("dispatch, bf16", "NCCL", "combine", "NCCL#2")
        yield dict(zip(heads, times, strict=True)) | {"window": windows(found, named["tokens"], named["layout"])}


@derives("H200s | tokens a rank | library, layout", "H200s | tokens a rank | library, layout")
def alone(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    who, layout = cells["library, layout"].rsplit(", ", 1)
    named = {"who": who, "layout": layout, "gpus": int(cells["H200s"]), "tokens": int(cells["tokens a rank"])}
    for found in table.results:
        of = {(row["what"], row["dtype"]): [*row["us"]] for row in rows(found, **named)}
        if of:
            yield {"dispatch, FP8": of["dispatch", "fp8"], "combine": of["combine", "bf16"]}


@derives("`moecomm.compat.deep_ep` over", "`moecomm.compat.deep_ep` over our own calls, GPUs | mode")
def interface(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        if not found["name"].startswith("deep-ep-layer"):
            continue
        if [gpus_of(found), found["case"]["mode"]] != [*cells.values()][:2]:
            continue
        timed_rows = rows(found)
        ratios = [row["of_native"] for row in timed_rows]
        more = [row for row in timed_rows if row.get("host_more_us") is not None]
        kinds = {
            "added host time, median": more,
            "with a clone of `topk_idx`": [
                row for row in more if row["what"] == "elastic dispatch" and "not copied" not in row["variant"]
            ],
            "with a budget": [row for row in more if row["what"] == "hybrid dispatch"],
        }
        sizes = [row["window_bytes"] for row in found["rows"] if "window_bytes" in row]
        yield {
            "operations": [len(ratios)],
            "median ratio": [statistics.median(ratios)],
            "largest": [max(ratios)],
            "window": [max(sizes)] if sizes else [],
        } | {head: [statistics.median(r["host_more_us"] for r in of)] if of else [] for head, of in kinds.items()}


@derives("pass, one H100", "pass, one H100")
def passes(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        for row in rows(found, what=cells["pass, one H100"]):
            if "torch_us" in row:
                yield {"ours": [row["us"]], "torch operations": [row["torch_us"]]}


@derives("rows | by | dispatch", "rows | by")
def gloo(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    by = cells["by"].strip("`")
    found = next(found for found in table.results if "medians" in found)
    for way in [by] if by != "gloo" else ["gloo_by_rank" if "rank" in cells["rows"] else "gloo_by_expert"]:
        of = found["medians"][way]
        times = {head: [of[f"{head}_ms"] * 1e3] for head in ("dispatch", "combine", "both")}
        against = found["medians"]["gloo_by_rank" if by == "flat" else "gloo_by_expert"]["both_ms"]
        yield times | {"gloo over it": [] if by == "gloo" else [against / of["both_ms"]]}


@derives('favorites | Zipf | slots | no replicas | "token"', "favorites")
def balanced_rounds(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    for row in found["rows"]:
        if row["favorites"] == cells["favorites"]:
            means = {f'"{choice}"': [row[choice]["mean"]] for choice in ("token", "nearest", "balanced")}
            yield {"Zipf": [row["zipf"]], "slots": [row["slots"]], "no replicas": [row["none"]["mean"]], **means}


@derives("rounds that are verified", "rounds that are verified")
def verified(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    keys = {"none": "every_0", "each": "every_1", "none, mean": "unverified_mean", "one of 100, mean": "every_100"}
    for found in table.results:
        for row in found.get("rows", []):
            if row["layout"] == cells["rounds that are verified"]:
                yield {head: [row[f"ms_{key}"] * 1e3] for head, key in keys.items()}


@derives("rows | number | median error", "rows")
def model_errors(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        for error in found.get("errors", []):
            if error["kind"] == cells["rows"]:
                shares = {head: [error[key]] for head, key in (("median error", "median"), ("signed", "signed"))}
                yield {"number": [error["rows"]], **shares, "worst": [error["worst"]]}


@derives("GPUs, 8 a domain", "GPUs, 8 a domain | tokens a rank")
def predicted(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    gpus, tokens = int(cells["GPUs, 8 a domain"]), int(cells["tokens a rank"])
    (found,) = (found for found in table.results if found["name"] == "simulate")
    for row in found["rows"]:
        bound = all(f"({row[what]['bound']})" in cells[what] for what in ("dispatch", "combine"))
        if (row["gpus"], row["tokens"]) == (gpus, tokens) and bound:
            layer = {"layer": [row["layer"]["serial_us"]], "overlapped": [row["layer"]["overlapped_us"]]}
            yield {what: [row[what]["us"]] for what in ("dispatch", "combine")} | layer


# docs/maintainers/measured_calls.md.


@derives("GPUs | model | tokens a rank | layer", "GPUs | model | tokens a rank | layer")
def single_layers(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    named = {"model": cells["model"], "tokens": int(cells["tokens a rank"]), "variant": cells["layer"]}
    for found in table.results:
        if gpus_of(found) != cells["GPUs"]:
            continue
        for row in rows(found, who="moecomm", what="layer", **named):
            times = {
                "alone, p50": row["alone_us"]["p50"],
                "p99": row["alone_us"]["p99"],
                "in a graph": row["us"]["p50"],
            }
            times |= {"sustained": row["sustained_us"], "eager": row["eager_us"]["p50"], "host": row["host_us"]}
            yield {head: [us] for head, us in times.items()} | {"window": opened([row])}


@derives("GPUs | tokens a rank | layout, payload", "GPUs | tokens a rank | layout, payload | experts")
def decode(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    layout, payload = cells["layout, payload"].split(", ")
    for found in table.results:
        if gpus_of(found) != cells["GPUs"]:
            continue
        experts = "stand-in" if cells["experts"] == f"{found.get('expert_us', 0):g} us a layer" else cells["experts"]
        named = {"tokens": int(cells["tokens a rank"]), "layout": layout.strip("`"), "payload": payload}
        named |= {"experts": experts}
        for step, late in product(rows(found, **named, delays=False), rows(found, **named, delays=True)):
            heads = ("a token, p50", "p99", "out of step, p50", "p99#2")
            times = [row["us"][part] for row in (step, late) for part in ("p50", "p99")]
            window = opened([step])
            shown = {head: [us] for head, us in zip(heads, times, strict=True)}
            yield shown | {"waits": [found["waits_us"]], "window": window}


@derives("model | GPUs | tokens a rank | step", "model | GPUs | tokens a rank | step")
def training(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for found in table.results:
        if (gpus_of(found), found["case"]["model"]) != (cells["GPUs"], cells["model"]):
            continue
        named = {"tokens": int(cells["tokens a rank"]), "what": cells["step"]}
        for row in rows(found, who="moecomm", **named):
            times = [other["us"]["p50"] for other in rows(found, **named) if other["who"].startswith("torch")]
            us = row["us"]["p50"]
            yield {
                "moecomm": [us],
                "a layer": [us / found["layers"]],
                "TFLOP/s": [row["tflops"]],
                "torch's": [min(times) / us] if times else [],
                "window": opened([row]),
            }


# docs/maintainers/measured_checks.md.


@derives("tokens | layout | dispatch: before", "tokens | layout")
def checks(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    named = {"tokens": int(cells["tokens"]), "layout": cells["layout"].strip("`")}
    for found in table.results:
        of = {row["what"]: [row["us_before"], row["us"], row["us"] / row["us_before"]] for row in rows(found, **named)}
        yield {"dispatch: before, with checks": of["dispatch"], "dispatch and combine": of["dispatch and combine"]}


@derives("tokens | recorded, p50", "tokens")
def recorder(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for row in rows(table.results[0], tokens=int(cells["tokens"])):
        yield {
            "recorded, p50": [row["us"]["p50"]],
            "p99": [row["us"]["p99"]],
            "without, p50": [row["us_off"]["p50"]],
            "p99#2": [row["us_off"]["p99"]],
            "a call takes more": [row["a_call_us"]],
        }


@derives("tokens | layout | without counters", "tokens | layout")
def counters(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    for row in table.results[0]["rows"]:
        if (str(row["tokens"]), f"`{row['layout']}`") == (cells["tokens"], cells["layout"]):
            off, on, again, mask = (row[which]["p50"] for which in ("off", "on", "again", "mask"))
            times = {"without counters": [off], "with": [on], "and a table of experts": [mask]}
            # Ratios are medians of pairs in JSON, which differ from those of the medians.
            assert abs(on / off - row["on_by_off"]) < 0.005 and abs(mask / on - row["mask_by_on"]) < 0.005
            assert abs(again / on - row["again_by_on"]) < 0.005
            ratios = [row[key] for key in ("on_by_off", "again_by_on", "mask_by_on")]
            heads = ("with / without", "with / with", "table / with")
            yield times | {head: [ratio] for head, ratio in zip(heads, ratios, strict=True)}


@derives("thread; block, thousands", "thread; block, thousands")
def instructions(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    what, layout = cells["thread; block, thousands"].split(", ")
    of = [row for row in table.results[0]["rows"] if (row["what"], f"`{row['layout']}`") == (what, layout)]
    yield {f"{row['ranks']} ranks": [row["of_a_thread"], row["of_a_block"] / 1e3] for row in of if row["blocks"] == 32}


@derives("step | on | passed", "step | on | passed | at | since")
def gpu_tests(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    mine = [row for row in found["rows"] if (f"`{row['step']}`", row["on"]) == (cells["step"], cells["on"])]
    passed = [at for at, row in enumerate(mine) if row["outcome"] == "passed"]
    when = [cells["passed"], cells["at"]]
    if when == ([mine[passed[-1]]["date"], f"`{mine[passed[-1]]['commit']}`"] if passed else ["", ""]):
        later = mine[passed[-1] + 1 :] if passed else mine
        since = f"{later[-1]['outcome']}, {later[-1]['date']}, `{later[-1]['commit']}`" if later else ""
        if cells["since"] == since:
            yield {"tests": [mine[passed[-1]]["tests"]] if passed and mine[passed[-1]]["tests"] else []}


@derives("result | what | number, none failed", "result | what | kinds")
def correctness(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = (found for found in table.results if f"`{found['name']}`" == cells["result"])
    assert all(not row.get("failed") for row in found["rows"])
    kinds = [row.get("kind") or row.get("dtype", "domains of CPU ranks") for row in found["rows"]]
    if cells["kinds"].split("; ") != [*dict.fromkeys(kinds)]:
        return
    yield {"number, none failed": [sum(row[cells["what"].replace(" ", "_")] for row in found["rows"])]}


@derives("tokens travel in", "tokens travel in | gradients of results in | sequences")
def quantized_training(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    found = result("quantized-training-cpu")
    labels = "tokens travel in", "gradients of results in"
    plain = [row["losses"] for row in found["rows"] if (row["forward"], row["backward"]) == ("bf16", "bf16")]
    for row in found["rows"]:
        if [row["forward"], row["backward"]] != [cells[label] for label in labels]:
            continue
        if (cells["sequences"] == "others") != (row["sequences"] == 1):
            continue
        means = dict(zip(range(20, found["steps"] + 1, 20), row["losses"], strict=True))
        last = found["steps"]
        yield {
            "steps 1 to 20": [means[20]],
            "81 to 100": [means[100]],
            f"{last - 19} to {last}": [means[last]],
            "over bf16": [means[last] - plain[0][-1]],
        }


@derives("model | dtype | GEMM | 16 tokens", "model | dtype | GEMM")
def weights(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    gemm, _, activation = cells["GEMM"].partition(", ")
    named = {"model": cells["model"], "dtype": cells["dtype"], "gemm": int(gemm), "activation": activation or None}
    yield {
        f"{row['tokens']} tokens": [row["us"][row["chosen"]], row["tbs"] / found["read_tbs"]]
        for row in rows(found, **named)
    }


@derives("model | dtype | layers | over", "model | dtype | layers | over | graphs")
def served(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    """The first row of a result is the reference."""
    over = {"allgather_reducescatter": "vllm", "deepep_low_latency": "ll", "deepep_high_throughput": "ht"}
    backend = over[cells["over"].split("`")[1]]
    assert cells["over"].startswith("vLLM" if backend == "vllm" else "moecomm")
    for found in table.results:
        named = {"model": cells["model"], "dtype": cells["dtype"], "layers": int(cells["layers"]), "backend": backend}
        assert found["rows"][0]["backend"] == "alone" and found["ranks"] == 2 and found["shared_gpus"]
        for row in (row for row in found["rows"] if named.items() <= row.items()):
            if cells["graphs"] == ("no" if row["graphs"] == "NONE" else "yes"):
                yield {
                    "same tokens": [row["same"], row["tokens"]],
                    "log probabilities apart": [row["logprob_difference"]],
                }


@derives("run | calls of `deep_ep`", "run")
def sglang(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    assert found["rows"][0]["run"] == "none" and found["ranks"] == 2 and found["shared_gpus"]
    (row,) = (row for row in found["rows"] if f"`{row['run']}`" == cells["run"])
    assert re.findall(r"`(\w+)`", cells["calls of `deep_ep`"]) == [*row["calls"]]
    yield {
        "calls of `deep_ep`": list(row["calls"].values()),
        "experts apart": [row["expert_error"]] if "expert_error" in row else [],
        "same tokens": [row["same"], row["steps"]],
        "logits apart": [row["logit_error"]["p50"]],
    }


@derives("result | conditions", "result | conditions")
def after_kills(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    """Their conditions are the page's."""
    (found,) = (found for found in table.results if f"`{found['name']}`" == cells["result"])
    steps = ("noticed", "mask", "first_round_after_mask", "shrink", "first_round_after_shrink", "grow", "join")
    heads = ("noticed", "`mask()`", "first round", "`shrink()`", "first round#2", "`grow()`", "joined")
    for row in found["rows"]:
        times = {head: row.get(f"{step}_ms") for head, step in zip(heads, steps, strict=True)}
        yield {head: [ms["p50"], ms["p99"]] if ms else [] for head, ms in times.items()}


# docs/maintainers/all_gather_matmul_study.md.


@derives("# | variant", "# | variant (name in the source) | class")
def variants(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    (row,) = (row for row in found["rows"] if str(row["variant"]) == cells["#"])
    source = row["source"] or {}
    assert row["name"] in cells["variant (name in the source)"]
    assert source.get("name", "") in cells["variant (name in the source)"] and row["kind"] == cells["class"]
    firsts = found["rows"][0]
    work = 2 * found["size"] ** 3 / 1e6
    tflops = work / row["us"]["p50"] if "us" in row else 0.0
    ours = {
        f"{found['ranks']} H100s, ours: ms": [row["us"]["p50"] / 1e3] if tflops else [],
        "TFLOP/s#2": [tflops] if tflops else [],
        "of 1#2": [tflops / (work / firsts["us"]["p50"])] if tflops else [],
    }
    yield ours | {
        "8 H100s, published: ms": [source["ms"]] if source else [],
        "TFLOP/s": [source["tflops"]] if source else [],
        "of 1": [source["tflops"] / firsts["source"]["tflops"]] if source else [],
    }


@derives("type | M = N = K", "type | M = N = K")
def squares(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    size = int(cells["M = N = K"])
    work = 2 * size**3 / 1e6
    of = {row["who"]: work / row["us"]["p50"] for row in rows(found, case=f"{size}^3", dtype=cells["type"])}
    heads = {"8: one kernel, TFLOP/s": "moecomm", "1: NCCL and a product": "nccl", "torch's": "torch"}
    yield {head: [of[who]] for head, who in (heads | {"the product alone": "alone"}).items()}


# Ratios on pages for users.


@derives("operator | over NCCL", "operator | slower than NCCL")
def operator_speeds(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    operator, *kind = cells["operator"].split(", ")
    for found in table.results:
        over: dict[str, dict[tuple[str, str], float]] = {"nccl": {}, "torch": {}}
        for row in rows(found, operator=operator.strip("`")):
            few = "batch" in row["case"] and operator == "`matmul_all_reduce`"
            if row["who"] not in over or (row["dtype"] == "fp8") != ("FP8" in kind) or few != ("up to 16 rows" in kind):
                continue
            (ours,) = rows(found, who="moecomm", case=row["case"], dtype=row["dtype"])
            over[row["who"]][row["case"], row["dtype"]] = row["us"]["p50"] / ours["us"]["p50"]
        behind = "; ".join(case for (case, _), ratio in over["nccl"].items() if ratio < 1)
        if over["nccl"] and cells["slower than NCCL"] == (behind or "-"):
            ranges = {who: [min(some.values()), max(some.values())] if some else [] for who, some in over.items()}
            yield {"over NCCL": ranges["nccl"], "over torch": ranges["torch"]}


@derives("GPUs a domain | dispatch, `flat`", "GPUs a domain | result")
def shares_of_a_nic(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    found = next(one for one in table.results if f"`{one['name']}`" == cells["result"])
    each = found["case"]["ranks"] // 2
    assert cells["GPUs a domain"] == f"{each} {kind_of(found)}{'s' * (each > 1)}"
    gbs = float(found["case"]["nic"].split(",")[0])
    expected = Cells()
    for head, what, layout, variant in (
        ("dispatch, `flat`", "dispatch", "flat", ""),
        ("`expert`", "dispatch", "expert", ""),
        ("combine, `flat`, rows in the window", "combine", "flat", "y in the window"),
        ("rows outside", "combine", "flat", "y outside"),
        ("`expert`#2", "combine", "expert", "bf16 wire"),
    ):
        named = {"what": what, "layout": layout, "variant": variant, "payload": "bf16" if what == "dispatch" else ""}
        (row,) = rows(found, who="moecomm", tokens=4096, sms_asked=32, **named)
        expected[head] = [row["across_bytes"] / gbs / row["us"]["p50"] / 1e3]
    yield expected


# docs/maintainers/wide_ep.md and docs/maintainers/dlrm.md.


@derives("GPUs | tokens a rank | mean ranks per token", "GPUs | tokens a rank")
def wide(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    gpus, _, one_domain = cells["GPUs"].partition(", ")
    tokens, _, phase = cells["tokens a rank"].partition(", ")
    assert phase == {"128": "decode", "4096": "prefill"}[tokens]
    (found,) = table.results
    for row in found["one_domain" if one_domain else "rows"]:
        bound = all(f"({row[what]['bound']})" in cells[what] for what in ("dispatch", "combine"))
        if (row["gpus"], row["tokens"]) == (int(gpus), int(tokens)) and bound:
            times = {what: [row[what]["us"]] for what in ("dispatch", "combine")}
            yield times | {"mean ranks per token": [row["ranks_wanted"]]}


@derives("library | kernels | GPUs", "library | kernels | GPUs | tokens | operation")
def published(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    for row in found["published"]:
        named = {
            "library": ", ".join(filter(None, (row["library"], row["by_cpu"]))),
            "kernels": "low latency" if row["kind"].endswith(" LL") else "throughput",
            "GPUs": str(row["domains"] * row["ranks"]),
            "tokens": str(row["tokens"]),
            "operation": f"{row['what']} {row['payload']}".strip(),
        }
        if named.items() <= cells.items() and ("‡" in cells["error"]) == bool(row["not_counted"]):
            error = row["predicted_us"] / row["measured_us"] - 1
            times = {"published": "measured_us", "model": "predicted_us", "moecomm": "moecomm_us"}
            yield {head: [row[key]] for head, key in times.items()} | {"error": [error]}


FORMS = ("torch", "unfused", "fused")


@derives("nodes | torch", "nodes")
def iterations(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    for row in found["rows"]:
        if str(row["gpus"]) == cells["nodes"]:
            us = {form: row["forms"][form]["us"] for form in FORMS}
            savings = {
                "saving": [1 - us["fused"] / us["unfused"]],
                "saving over torch": [1 - us["fused"] / us["torch"]],
            }
            yield {form: [us[form]] for form in FORMS} | savings


@derives("phase | torch", "phase")
def phases(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    forms = found["rows"][-1]["forms"]
    expected = {}
    for form in FORMS:
        whole = {"iteration": forms[form]["us"]}
        us = whole | {phase["name"]: phase["us"] for phase in forms[form]["phases"]}
        expected[form] = [us[cells["phase"]]] if cells["phase"] in us else []
    yield expected


@derives("setting | unfused", "setting")
def settings(table: Table, cells: dict[str, str]) -> Iterator[Cells]:
    (found,) = table.results
    for one in (*found["steps"], *found["changes"]):
        if one["name"] == cells["setting"]:
            saving = 1 - one["fused_us"] / one["us"]
            # Operators save at most their share of the iteration.
            assert abs(saving) <= one["share"]
            yield {
                "unfused": [one["us"]],
                "fused": [one["fused_us"]],
                "share": [one["share"]],
                "operator": [one["operator_saving"]],
                "saving": [saving],
            }
