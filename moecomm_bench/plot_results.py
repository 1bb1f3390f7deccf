"""Contents of pictures: one question a panel, for each benchmark that has pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


_FORMS = {"": "unfused", "sequential": "unfused", "one launch": "fused", "bf16 wire": "unfused, bf16 wire"}


def layers(result: Result) -> list[Row]:
    """Return rows of each model, by the type of weights: time, and time over the GEMMs alone."""
    rows = [row for row in result["rows"] if "us" in row and row["what"] in ("layer", "GEMMs")]
    found: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for dtype in ("bf16", "FP8"):
            forms, alone = [], {}
            for row in rows:
                if row["model"] != model or row["variant"].startswith("fp8") != (dtype == "FP8"):
                    continue
                variant = row["variant"].removeprefix("fp8").strip(", ")
                if row["what"] == "layer":
                    ours = row["who"] == "moecomm"
                    forms.append(row | {"variant": _FORMS.get(variant, variant) if ours else variant})
                elif row["who"] == "moecomm":
                    alone[row["tokens"]] = row["us"]["p50"]
            by, ratios = ("who", "variant"), [row for row in forms if "of_gemms" in row]
            columns = [
                _lines(forms, "tokens", by, lambda row: row["us"]["p50"]),
                _lines(ratios, "tokens", by, lambda row: row["of_gemms"]),
            ]
            ones = dict.fromkeys(alone, 1.0)
            keep = [[Line("GEMMs alone", sorted(of.items()), REFERENCE)] if of else [] for of in (alone, ones)]
            title = f"{model or 'numbers given'}, {dtype} weights"
            found += _panels(title, "tokens a rank", ["us", "time / GEMMs alone"], columns, keep, from_zero={1})
    return found


def products(result: Result) -> list[Row]:
    """Return a row of each model and number of ranks: TFLOP/s of each grouped GEMM."""
    rows = []
    for row in result["rows"]:
        ours = row["us"][row["chosen"]]
        times = {"moecomm": ours, **{who: us for who, us in row["us"].items() if who not in _PRODUCTS}}
        rows += [row | {"who": who, "us": us, "speed": row["tflops"] * ours / us} for who, us in times.items()]
    found: list[Row] = []
    for (model, ranks), some in _grouped(rows, ("model", "ranks")).items():
        panels = [
            Panel(
                f"{model}, {ranks} ranks: GEMM {number}{f', {activation}' * bool(activation)}",
                "tokens a rank",
                "TFLOP/s",
                part,
                False,
            )
            for (number, activation), of in _grouped(some, ("gemm", "activation")).items()
            for part in split(_lines(of, "tokens", ("who", "dtype"), lambda row: row["speed"]))
        ]
        found += [panels[begin : begin + 3] for begin in range(0, len(panels), 3)]
    return found


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


def puts(result: Result) -> list[Row]:
    """Return rows of put + signal over bytes: by a warp, and by other methods."""
    rows = [row for row in result["rows"] if "us" in row]
    found: list[Row] = []
    for by_warp in (True, False):
        some = [row for row in rows if row["method"].endswith("a warp") == by_warp]
        by = ("backend", "method") if len({row.get("backend") for row in some}) > 1 else ("method",)
        times, speeds = (_lines(some, "bytes", by, v) for v in (lambda r: r["us"]["p50"], lambda r: r["gbs"]))
        title = "put + signal by a warp" if by_warp else "put + signal by other means"
        found += _panels(title, "bytes", ["us", "GB/s"], [times, speeds])
    return found


def links(result: Result) -> list[Row]:
    """Return rows of all-to-alls: over SMs, and by copy engines."""
    found: list[Row] = []
    for title, by_sms in (("all-to-all by SMs", True), ("all-to-all by copy engines", False)):
        rows = [row for row in result["rows"] if "us" in row and bool(row["sms"]) == by_sms]
        times, speeds = (_lines(rows, "sms", ("method",), v) for v in (lambda r: r["us"]["p50"], lambda r: r["gbs"]))
        found += _panels(title, "SMs", ["us", "GB/s a rank"], [times, speeds], from_zero={0, 1})
    return found


def backends(result: Result) -> list[Row]:
    """Return a row for each operation through several backends: over tokens, or over the number of domains."""
    ranks = result["case"]["ranks"]
    rows = [
        row | {"domains": ranks // (row["domain_ranks"] or ranks)}
        for row in result["rows"]
        if "us" in row and row["what"] != "pair"
    ]
    over = "tokens" if len({row["tokens"] for row in rows}) > 1 else "domains"
    by = ("backend", "domains") if over == "tokens" and len({row["domains"] for row in rows}) > 1 else ("backend",)
    speed, head = ("wire_gbs", "GB/s that leave a rank") if over == "tokens" else ("across_gbs", "GB/s between domains")
    found: list[Row] = []
    for title, some in _by(rows, (*_ROUND, "variant")).items():
        times = _lines(some, over, by, lambda row: row["us"]["p50"])
        speeds = _lines(some, over, by, lambda row: row[speed])
        x = "tokens a rank" if over == "tokens" else f"domains, {some[0]['tokens']} tokens a rank"
        found += _panels(title, x, ["us", head], [times, speeds], from_zero={1})
    return found


def predictions(result: Result) -> list[Row]:
    """Return a row for each number of tokens: rounds, layers, and bandwidth between domains, over GPUs."""
    values: dict[str, dict[str, Callable[[Result], float]]] = {
        "us of a round": {"dispatch": lambda row: row["dispatch"]["us"], "combine": lambda row: row["combine"]["us"]},
        "us of a layer": {
            "unfused": lambda row: row["layer"]["serial_us"],
            "overlapped": lambda row: row["layer"]["overlapped_us"],
            "GEMMs alone": lambda row: row["layer"]["gemm_us"],
        },
        "GB/s between domains": {
            "dispatch": lambda row: _between_domains(row["dispatch"]),
            "combine": lambda row: _between_domains(row["combine"]),
        },
    }
    found: list[Row] = []
    for (tokens,), rows in _grouped(result["rows"], ("tokens",)).items():
        panels = []
        for head, of in values.items():
            lines = [
                Line(label, sorted((row["gpus"], value(row)) for row in rows), OURS, dashes)
                for (label, value), dashes in zip(of.items(), DASHES, strict=False)
            ]
            lines = [line._replace(color=REFERENCE) if line.label == "GEMMs alone" else line for line in lines]
            panels.append(Panel(f"{tokens} tokens a rank", "GPUs", head, lines, head.startswith("us")))
        found.append(panels)
    return found


def _between_domains(part: dict[str, float]) -> float:
    return part["slow_bytes"] / part["us"] / 1e3


KINDS: dict[str, Callable[[Result], list[Row]]] = {
    "dispatch-combine": rounds,
    "moe": layers,
    "gemm": products,
    "overlap": operators,
    "latency": puts,
    "latency-backends": puts,
    "all-to-all": links,
    "backends": backends,
    "simulate": predictions,
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


def _lines(rows: list[Result], over: str, by: tuple[str, ...], value: Callable[[Result], float]) -> list[Line]:
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
