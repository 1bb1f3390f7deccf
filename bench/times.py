"""Tables of three times for each operation: one call alone, many in a row, and eager; of decode and of training steps.

They are made of the results that have these times, whatever their machine: `times-*`, `zipf-*`, `recorded-*`,
`symm-mem-*`, `decode-*` and `training-*`. Without any there is no table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from readme import (
    WINDOW,
    WINDOW_IS,
    layer_parts,
    line,
    load,
    names,
    round_parts,
    source,
    table,
    time_of,
    window_in,
    window_of,
)

OPERATIONS = ("times", "zipf", "recorded", "symm-mem")
FRONT = ("h200-4", "h200-8")  # ends of names: machines of the main README, each with a table
FRONT_TOKENS = (128, 4096)
COLUMNS = "GPUs | tokens a rank | library, layout | operation | alone, {} | in a graph | eager | host | SMs | window"
FEW_PARTS, PARTS = ("p50", "p99"), ("p50", "p90", "p99")  # of single calls, in the main README and elsewhere
_LIBRARY = 2  # the column that names the library
SKEWED, EVEN = "zipf-h200-4", "times-many-h200-4"
_SLOW = 1.2  # eager over graph: above it, the host alone does not explain the time
_TAIL = 1.5  # p99 over p50 of a decode step


def found(*kinds: str) -> list[str]:
    """Return the names of results of these kinds: KIND-..."""
    return [name for kind in kinds for name in names() if name.startswith(f"{kind}-")]


def front() -> list[str]:
    """Return the tables of the main README, of all layouts, as paragraphs; none without a result."""
    tables = []
    for machine in FRONT:
        used = [name for name in found("times") if name.endswith(machine) and rows_of(name, front=True)]
        if used:
            rows = (row for name in used for row in rows_of(name, front=True))
            heads = COLUMNS.format(" | ".join(FEW_PARTS))
            tables += [table(heads, rows), *(note for name in used for note in no_room(name)), source(used)]
    if not tables:
        return []
    head = (
        "What one call costs, DeepSeek-V3: dispatch in bf16 and in FP8, combine of bf16 rows. *Alone*: "
        "a single call with caches flushed; ranks start within a microsecond. *In a graph*: the period of many calls. "
        "*Eager*: the period of calls that the host enqueues one by one. These are times of the slowest rank, medians "
        "unless the column says p99. *Host*: the time until an eager call returns, of the median rank. *SMs*: blocks "
        f"of the launch, one on each SM. {WINDOW_IS} In `expert` and `batched`, each rank "
        "first adds up its rows of a token; the sum travels in bf16 by default, or in fp32 with `wire='exact'`. Rows "
        "of `batched` take the time of `expert` within 2 %, in a graph and alone. Their eager times differ by more "
        "with 128 tokens, and their host times at both sizes, in both directions. They are in [Calls and "
        "steps](docs/measured_calls.md). JSON files also have p90:"
    )
    return [head, *tables, *skewed()]


def skewed() -> list[str]:
    """Return the paragraphs of skewed routing in the main README: a table and its sources; [] without results."""
    if not {SKEWED, EVEN} <= {*names()}:
        return []
    zipf, even = load(SKEWED), load(EVEN)
    keys = ("who", "tokens", "layout", "what", "payload", "variant", "sms_asked")
    lines = []
    for row in zipf["rows"]:
        alike = {key: row[key] for key in keys}
        other = next((one for one in even["rows"] if alike.items() <= one.items()), {})
        if row["who"] != "moecomm" or row["what"] == "pair" or not ("us" in row and "us" in other):
            continue
        what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
        us, even_us = row["us"]["p50"], other["us"]["p50"]
        cells = (f"`{row['layout']}`", what, time_of(even_us), time_of(us), f"{us / even_us:.2f}")
        cells = (*cells, window_in(zipf, row["tokens"], row["layout"]))
        lines.append(line(zipf, round_parts(row["tokens"], row["what"]), *cells, beside=even))
    exponent, size = zipf["case"]["routing"]["zipf"], zipf["case"]["tokens"][0]
    head = (
        f"Skewed routing, {zipf['case']['ranks']} {gpu(zipf)}, {size} tokens a rank, in a graph: experts are drawn by "
        f"Zipf's law with exponent {exponent}. Times of even routing are from another run. The ratio divides skewed by "
        "even; it includes the longer transfer to the busiest rank. *Window* is that of a Buffer for the skewed run. "
        "[Calls and steps](docs/measured_calls.md) has "
        "single and eager calls:"
    )
    return [head, table(f"layout | operation | even routing | skewed | ratio{WINDOW}", lines), source((SKEWED, EVEN))]


def no_room(name: str) -> list[str]:
    """Return a note on eager combines that found no room in the window; [] without any.

    Pairs of such a result name `window_bytes` as the reason why they did not run.

    Graphs keep the memory of their outputs. Without room for rows of their own, eager combines use a ring.
    """
    result = load(name)
    full = any(row["what"] == "pair" and row.get("why", "").startswith("window_bytes") for row in result["rows"])
    slow = [
        f"{row['tokens']} tokens, `{row['layout']}`, {row['variant']}"
        for row in result["rows"]
        if (row["who"], row["what"]) == ("moecomm", "combine")
        and row.get("eager_us")
        and row["eager_us"]["p50"] > _SLOW * row["us"]["p50"]
        and row["us"]["p50"] > (row["host_us"] or 0)  # else an eager call may wait for the host
    ]
    if not (full and slow):
        return []
    return [
        f"Eager combine of {'; '.join(slow)}: the rows went through a ring, which takes longer, because outputs of "
        "graphs left no room for a copy of `y` in the window. For the same reason the pair of dispatch and combine has "
        "no time in this run. The benchmark now opens a larger window."
    ]


def operations() -> str:
    """Return the table of the operations that have the three times, but those of the main README."""
    heads = COLUMNS.format(" | ".join(PARTS))
    return table(heads, (row for name in found(*OPERATIONS) for row in rows_of(name)))


def rows_of(name: str, *, front: bool = False) -> list[str]:
    """Return the rows of one result; with `front` those of moecomm at the sizes of the main README."""
    result, lines = load(name), []
    case = result["case"]
    for row in result["rows"]:
        if "alone_us" not in row:
            continue
        ours = row["who"] == "moecomm"
        if ours and row["what"] == "pair":
            continue
        is_front = ours and name.startswith("times-") and name.endswith(FRONT) and row["tokens"] in FRONT_TOKENS
        is_front &= row["layout"] != "batched"  # of which rows take the time of expert
        if (is_front and case["model"] == "deepseek-v3") != front:
            continue
        where = f"{case['ranks']} {gpu(result)}"
        parts = round_parts(row["tokens"], row["what"]) if ours else ()
        cells = _cells(result, row, FEW_PARTS if front else PARTS)
        lines.append(line(result, parts, where, *cells, at=(_LIBRARY,)))
    return lines


def _cells(result: dict[str, Any], row: dict[str, Any], parts: Iterable[str]) -> Iterable[str]:
    graph = result["case"]["mode"] == "graph"
    alone, eager = row["alone_us"], row.get("eager_us") if graph else row["us"]
    what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
    routing, model = result["case"].get("routing"), result["case"]["model"]
    skew = "" if not routing else f", Zipf {routing['zipf']}" if "zipf" in routing else ", recorded routing"
    other = f", {model}" if model != "deepseek-v3" else ""
    yield str(row["tokens"])
    yield f"{row['who']}, `{row['layout']}`" + skew + other
    yield what
    yield from (time_of(alone[part]) for part in parts)
    yield time_of(row["us"]["p50"]) if graph else ""
    yield time_of(eager["p50"]) if eager else ""
    yield "" if row["host_us"] is None else time_of(row["host_us"])
    yield str(row["sms"] or "")
    yield _window(result, row)


def _window(result: dict[str, Any], row: dict[str, Any]) -> str:
    return window_in(result, row["tokens"], row["layout"]) if row["who"] == "moecomm" else ""


def whole_layers() -> list[str]:
    """Return the names of the results of expert layers that have single calls and eager ones."""
    return [name for name in found("moe") if any("alone_us" in row for row in load(name)["rows"])]


def layers() -> str:
    """Return the table of expert layers."""
    heads = "GPUs | model | tokens a rank | layer | alone, p50 | p99 | in a graph | sustained | eager | host" + WINDOW
    lines = []
    for name in whole_layers():
        result = load(name)
        where = f"{len(result['machine']['gpus'])} {gpu(result)}"
        for row in result["rows"]:
            if row["what"] != "layer" or row["who"] != "moecomm":
                continue
            alone = [time_of(row["alone_us"][part]) for part in FEW_PARTS]
            others = (row["us"]["p50"], row["sustained_us"], row["eager_us"]["p50"], row["host_us"])
            cells = (str(row["tokens"]), row["variant"], *alone, *map(time_of, others), window_of(row))
            lines.append(line(result, layer_parts(row["tokens"]), where, row["model"], *cells, at=(1,)))
    return table(heads, lines)


def decode() -> str:
    """Return the table of decode steps: in step, and out of step."""
    heads = "GPUs | tokens a rank | layout, payload | experts | a token, p50 | p99 | out of step, p50 | p99 | waits"
    heads += WINDOW
    lines = []
    for name in found("decode"):
        result = load(name)
        rows = [row for row in result["rows"] if "us" in row]
        for row in rows:
            alike = {key: row[key] for key in ("tokens", "layout", "payload", "experts")} | {"delays": True}
            late = next((other for other in rows if alike.items() <= other.items()), None)
            if row["delays"] or late is None:
                continue
            times = [time_of(r["us"][part]) for r in (row, late) for part in ("p50", "p99")]
            experts = row["experts"] if row["experts"] != "stand-in" else f"{result['expert_us']:g} us a layer"
            cells = (str(row["tokens"]), f"`{row['layout']}`, {row['payload']}", experts, *times)
            waits = time_of(result["waits_us"])
            where = f"{result['case']['ranks']} {gpu(result)}"
            lines.append(line(result, round_parts(row["tokens"]), where, *cells, waits, window_of(row), at=(_LIBRARY,)))
    return "\n\n".join([table(heads, lines), *tails()])


def tails() -> list[str]:
    """Return a note on each result of decode in which p99 is far above the median; [] without any."""
    worst = {}
    for name in found("decode"):
        ratios = [row["us"]["p99"] / row["us"]["p50"] for row in load(name)["rows"] if "us" in row]
        if max(ratios, default=0) > _TAIL:
            worst[name] = max(ratios)
    return [
        f"`{name}`: p99 is up to {ratio:.1f} times p50. This is not explained: the result has neither clocks nor the "
        f"times of single steps.{' No other result of decode has such a p99.' if len(worst) == 1 else ''}"
        for name, ratio in worst.items()
    ]


def training() -> str:
    """Return the table of training steps."""
    heads = f"model | GPUs | tokens a rank | step | moecomm | a layer | TFLOP/s | torch's{WINDOW}"
    lines = []
    for name in found("training"):
        result = load(name)
        for row in result["rows"]:
            if row["who"] == "moecomm" and "us" in row:
                times = (time_of(row["us"]["p50"]), time_of(row["layer_us"]), f"{row['tflops']:.0f}")
                torchs = f"{row['of_torch']:.2f}" if "of_torch" in row else ""
                where = (f"{result['case']['ranks']} {gpu(result)}", str(row["tokens"]), row["what"])
                parts = layer_parts(row["tokens"])
                cells = (*where, *times, torchs, window_of(row))
                lines.append(line(result, parts, result["case"]["model"], *cells))
    return table(heads, lines)


def gpu(result: dict[str, Any]) -> str:
    """Return the name of the machine's GPUs, short."""
    gpus = result["machine"]["gpus"]
    return next((word for word in gpus[0].split() if word[1:].isdigit()), gpus[0]) + "s" if gpus else "CPU ranks"
