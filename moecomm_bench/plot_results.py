"""Contents of pictures: one question a panel, for each benchmark that has pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moecomm.fused.schedules import FP8_SCHEDULES, SCHEDULES
from moecomm_bench import beside
from moecomm_bench.plot_panels import DASHES, OTHERS, OURS, REFERENCE, Dots, Line, Panel, Row, split

Result = dict[str, Any]
_ROUND = ("layout", "what", "payload")
_PRODUCTS = {*SCHEDULES, *FP8_SCHEDULES, "apart"}  # times of ours in a result of `gemm`


def about(result: Result) -> str:
    """Return a title: ranks, machine and sizes."""
    case, machine = result.get("case") or {}, result.get("machine") or {}
    if result["benchmark"] == "simulate":
        nic = result["inputs"]["nic"]["gbs"]
        model = case["model"] or "numbers given"
        return f"Predicted, not measured: {model}, {case['ranks']} GPUs a domain, NIC {nic:g} GB/s"
    gpus = machine["gpus"] and case.get("backend") != "host" and result.get("device") != "cpu"
    ranks = case.get("ranks", result.get("ranks"))
    parts = [f"{ranks} ranks" if ranks else "", machine["gpus"][0] if gpus else machine["cpu"], case.get("model") or ""]
    if "hidden" in case:
        parts.append(f"hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts")
    return ", ".join(filter(None, parts))


def rows_of(result: Result) -> list[Row]:
    """Return the rows of panels of a result."""
    return KINDS[result["benchmark"]](result)


def rounds(result: Result) -> list[Row]:
    """Return a row for each operation: times in a graph, alone and eager, or time and bandwidth over tokens."""
    if beside.has_peers(result):
        return [[dots] for tokens in result["case"]["tokens"] if (dots := others(result, tokens)).cases]
    sms = result["case"]["sms"][0]
    rows = [
        row
        for row in result["rows"]
        if "us" in row and row["what"] != "pair" and (row["who"] != "moecomm" or row["sms_asked"] == sms)
    ]
    with_singles = [row for row in rows if "alone_us" in row]
    found: list[Row] = []
    for title, some in _by(rows, _ROUND).items():
        mode = "in a graph" if result["case"].get("mode") == "graph" else "a call"
        times = _lines(some, "tokens", ("who", "variant"), lambda row: row["us"]["p50"])
        if with_singles:
            eager = "us" if result["case"].get("mode") == "eager" else "eager_us"
            shown = [times, _spread(some, "alone_us"), _spread(some, eager)]
            heads = [f"us, {mode}", "us alone, bars to p99", "us eager, bars to p99"]
            found += _panels(title, "tokens a rank", heads, shown)
            continue
        keep, ceiling = _ceiling(result, some)
        speeds = _lines(some, "tokens", ("who", "variant"), lambda row: row["wire_gbs"])
        heads = [f"us, {mode}", "GB/s that leave a rank"]
        found += _panels(title, "tokens a rank", heads, [times, speeds], [keep, ceiling], from_zero={1})
    return found


def _ceiling(result: Result, rows: list[Result]) -> tuple[list[Line], list[Line]]:
    """Return the time of the bytes at the fastest all-to-all of the run, and its rate; [] without one."""
    if not result["ceiling"]:
        return [], []
    best = result["ceiling"][0]
    ours = sorted((row for row in rows if row["who"] == "moecomm"), key=lambda row: int(row["tokens"]))
    wire = {row["tokens"]: row["wire_bytes"] / best["gbs"] / 1e3 for row in ours}
    label = f"all-to-all {beside.ceiling_is(result['rows'])}"
    if not wire:
        return [], []
    rate = Line(label, [(tokens, best["gbs"]) for tokens in wire], REFERENCE)
    return [Line("wire time", [*wire.items()], REFERENCE)], [rate]


def others(result: Result, tokens: int) -> Dots:
    """Return the time of each other library over that of moecomm, for FP8 dispatches and all combines."""
    found = [one for one in beside.operations(result) if one.tokens == tokens and one.payload in beside.MAIN]
    cases = [f"{beside.words(one)} ({_us(one.best['moecomm'].us)})" for one in found]
    dots = {
        name: {case: one.able[name].us / one.able["moecomm"].us for case, one in enumerate(found) if name in one.able}
        for name in beside.libraries(result)
        if name != "moecomm"
    }
    x = "time over that of moecomm, which is in parentheses; left of the line, the other library is faster"
    return Dots(f"{tokens} tokens a rank", x, cases, dots)


_NAMES = {"nccl": "computation and NCCL", "torch": "torch's fused operator", "alone": "computation alone"}


def operators(result: Result) -> list[Row]:
    """Return dots of each operator: time over that of moecomm's fused kernel, by case."""
    found: list[Row] = []
    for (operator,), rows in _grouped([row for row in result["rows"] if "us" in row], ("operator",)).items():
        of_cases = _grouped(rows, ("case", "dtype"))
        several = len({dtype for _, dtype in of_cases}) > 1
        times = {
            f"{case}, {dtype}" if several else case: {row["who"]: row["us"]["p50"] for row in some}
            for (case, dtype), some in of_cases.items()
        }
        times = {case: us for case, us in times.items() if "moecomm" in us}
        dots = {
            name: {nth: us[who] / us["moecomm"] for nth, us in enumerate(times.values()) if who in us}
            for who, name in _NAMES.items()
        }
        cases = [f"{case} ({_us(us['moecomm'])})" for case, us in times.items()]
        x = "time over that of moecomm's fused kernel, which is in parentheses"
        found.append([Dots(operator, x, cases, {name: ratios for name, ratios in dots.items() if ratios})])
    return found


@dataclass(frozen=True)
class Axes:
    """How a benchmark is drawn: a row of panels for each value of `panels`, a panel for each of `values`.

    Attributes:
        rows: rows of a result, with entries beside those that they have.
        x: entry and label of the horizontal axis.
        panels, lines: entries that tell rows of panels apart, and lines in a panel.
        values: label of each vertical axis, and its value; rows without it have no point.
        from_zero: which of them begin at 0; the others are logarithmic.
    """

    rows: Callable[[Result], list[Result]]
    x: tuple[str, str]
    panels: tuple[str, ...]
    lines: tuple[str, ...]
    values: dict[str, Callable[[Result], float | None]]
    from_zero: tuple[int, ...] = ()

    def __call__(self, result: Result) -> list[Row]:
        """Return the rows of panels of a result."""
        drawn: list[Row] = []
        over, label = self.x
        for title, some in _by(self.rows(result), self.panels).items():
            several = len({row.get(self.lines[0]) for row in some}) > 1 or len(self.lines) == 1
            lines = self.lines if several else self.lines[1:]
            columns = [
                _lines([row for row in some if value(row) is not None], over, lines, value)
                for value in self.values.values()
            ]
            drawn += _panels(title, label, [*self.values], columns, from_zero=self.from_zero)
        return drawn


def _median(row: Result) -> float:
    return float(row["us"]["p50"])


def _timed(result: Result) -> list[Result]:
    return [row for row in result["rows"] if "us" in row]


def _layers(result: Result) -> list[Result]:
    """Return layers and GEMMs, with the type of their weights apart from the form."""
    rows = []
    for row in _timed(result):
        if row["what"] in ("layer", "GEMMs"):
            fp8 = row["variant"].startswith("fp8")
            form = row["variant"].removeprefix("fp8").strip(", ") or ("unfused" if row["who"] == "moecomm" else "")
            title = f"{row['model'] or 'numbers given'}, {'FP8' if fp8 else 'bf16'} weights"
            rows.append(row | {"variant": form if row["what"] == "layer" else "GEMMs alone", "title": title})
    return rows


def _products(result: Result) -> list[Result]:
    """Return a row for each library that multiplied, with its speed."""
    speeds = []
    for row in result["rows"]:
        ours, activation = row["us"][row["chosen"]], f", {row['activation']}" if row["activation"] else ""
        about = row | {"title": f"{row['model']}, {row['ranks']} ranks: GEMM {row['gemm']}{activation}"}
        times = {"moecomm": ours, **{who: us for who, us in row["us"].items() if who not in _PRODUCTS}}
        speeds += [about | {"who": who, "speed": row["tflops"] * ours / us} for who, us in times.items()]
    return speeds


def _puts(result: Result) -> list[Result]:
    ways = (True, "put + signal by a warp"), (False, "put + signal by other means")
    return [
        row | {"title": title}
        for by_warp, title in ways
        for row in _timed(result)
        if row["method"].endswith("a warp") == by_warp
    ]


def _links(result: Result) -> list[Result]:
    titles = "all-to-all by copy engines", "all-to-all by SMs"
    return [row | {"title": titles[bool(row["sms"])]} for row in _timed(result)]


def backends(result: Result) -> list[Row]:
    """Return a row for each operation through several backends: over tokens, or over the number of domains."""
    ranks = result["case"]["ranks"]
    rows = [
        row | {"domains": ranks // (row["domain_ranks"] or ranks)} for row in _timed(result) if row["what"] != "pair"
    ]
    over_tokens = len({row["tokens"] for row in rows}) > 1
    several = over_tokens and len({row["domains"] for row in rows}) > 1
    x = ("tokens", "tokens a rank") if over_tokens else ("domains", f"domains, {rows[0]['tokens']} tokens a rank")
    speed = ("GB/s that leave a rank", "wire_gbs") if over_tokens else ("GB/s between domains", "across_gbs")
    lines = ("backend", "domains") if several else ("backend",)
    values: dict[str, Callable[[Result], float | None]] = {"us": _median, speed[0]: lambda row: float(row[speed[1]])}
    return Axes(lambda _: rows, x, (*_ROUND, "variant"), lines, values, (1,))(result)


def _predictions(result: Result) -> list[Result]:
    """Return a row for each part of a prediction: `round`, `between` (GB/s) or `layer`."""
    parts = []
    for row in result["rows"]:
        about = {"title": f"{row['tokens']} tokens a rank", "gpus": row["gpus"]}
        for what in ("dispatch", "combine"):
            of = row[what]
            parts.append(about | {"part": what, "round": of["us"], "between": of["slow_bytes"] / of["us"] / 1e3})
        for part, name in (("unfused", "serial_us"), ("overlapped", "overlapped_us"), ("GEMMs alone", "gemm_us")):
            parts.append(about | {"part": part, "layer": row["layer"][name]})
    return parts


_TOKENS_AXIS = ("tokens", "tokens a rank")
KINDS: dict[str, Callable[[Result], list[Row]]] = {
    "dispatch-combine": rounds,
    "moe": Axes(
        _layers,
        _TOKENS_AXIS,
        ("title",),
        ("who", "variant"),
        {"us": _median, "time / GEMMs alone": lambda row: row.get("of_gemms")},
        (1,),
    ),
    "gemm": Axes(
        _products, _TOKENS_AXIS, ("title",), ("who", "dtype"), {"TFLOP/s": lambda row: float(row["speed"])}, (0,)
    ),
    "overlap": operators,
    "all-to-all": Axes(
        _links,
        ("sms", "SMs"),
        ("title",),
        ("method",),
        {"us": _median, "GB/s a rank": lambda row: float(row["gbs"])},
        (0, 1),
    ),
    **dict.fromkeys(
        ("latency", "latency-backends"),
        Axes(
            _puts,
            ("bytes", "bytes"),
            ("title",),
            ("backend", "method"),
            {"us": _median, "GB/s": lambda row: float(row["gbs"])},
        ),
    ),
    "backends": backends,
    "simulate": Axes(
        _predictions,
        ("gpus", "GPUs"),
        ("title",),
        ("part",),
        {
            "us of a round": lambda row: row.get("round"),
            "us of a layer": lambda row: row.get("layer"),
            "GB/s between domains": lambda row: row.get("between"),
        },
        (2,),
    ),
}


def _us(us: float) -> str:
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def _grouped(rows: Iterable[Result], fields: tuple[str, ...]) -> dict[tuple[Any, ...], list[Result]]:
    found: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return found


def _by(rows: Iterable[Result], fields: tuple[str, ...]) -> dict[str, list[Result]]:
    return {", ".join(filter(None, key)): some for key, some in _grouped(rows, fields).items()}


def _lines(rows: list[Result], over: str, by: tuple[str, ...], value: Callable[[Result], Any]) -> list[Line]:
    """Return lines over a field, told apart by others, with those in which they differ as labels.

    Where libraries are compared, lines of moecomm are blue and differ by their dashes.
    """
    groups = _grouped(rows, by)
    several = [len({key[at] for key in groups}) > 1 for at in range(len(by))]
    shown = several if any(several) else [True] * len(by)
    others = iter(OTHERS * len(groups) if "who" in by else (OURS, *OTHERS) * len(groups))
    mine, found = iter(DASHES * len(groups)), []
    for key, some in groups.items():
        words = [
            f"{word} domains" if name == "domains" else str(word or "") for name, word in zip(by, key, strict=True)
        ]
        label = " ".join(word for word, show in zip(words, shown, strict=True) if show and word) or words[0]
        ours = "who" in by and some[0]["who"] == "moecomm"
        points = sorted((row[over], value(row)) for row in some)
        found.append(Line(label, points, OURS if ours else next(others), next(mine) if ours else "-"))
    return found


def _spread(rows: list[Result], field: str) -> list[Line]:
    """Return medians over tokens by library and variant, with bars to p99."""
    some = [row for row in rows if row.get(field)]
    most = {
        key: [row[field]["p99"] for row in sorted(of, key=lambda r: int(r["tokens"]))]
        for key, of in _grouped(some, ("who", "variant")).items()
    }
    lines = _lines(some, "tokens", ("who", "variant"), lambda row: row[field]["p50"])
    return [line._replace(most=ends) for line, ends in zip(lines, most.values(), strict=True)]


def _panels(
    title: str,
    x: str,
    heads: list[str],
    columns: list[list[Line]],
    keep: Iterable[list[Line]] = (),
    *,
    from_zero: Iterable[int] = (),
) -> list[Row]:
    """Return as many rows as the lines need; each column has its own lines, and lines that each of its panels keeps."""
    kept = [*keep] or [[]] * len(columns)
    parts = [split(lines, own) for lines, own in zip(columns, kept, strict=True)]
    return [
        [
            Panel(title, x, head, part[row], column not in from_zero)
            for column, (head, part) in enumerate(zip(heads, parts, strict=True))
            if row < len(part)
        ]
        for row in range(max(map(len, parts)))
    ]
