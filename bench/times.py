"""Tables of three times for each operation: one call alone, many in a row, and eager; of decode and of training steps.

They are made of the results that have these times, whatever their machine: `times-*`, `zipf-*`, `symm-mem-*`,
`decode-*` and `training-*`. Without any there is no table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from readme import WINDOW, layer_parts, line, load, names, round_parts, source, table, time_of, window_of

OPERATIONS = ("times", "zipf", "symm-mem")
FRONT = ("h200-4", "h200-8")  # ends of names: machines of the main README, each with a table
FRONT_TOKENS = (128, 4096)
COLUMNS = (
    "GPUs | tokens a rank | library, layout | operation | alone, p50 | p99 | in a graph | eager | host | SMs | window"
)


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
            tables += [table(COLUMNS, rows), source(used)]
    if not tables:
        return []
    head = (
        "What one call costs, DeepSeek-V3, FP8 dispatch, combine of bf16 rows. *Alone*: a single call with caches "
        "flushed; ranks start within a microsecond. *In a graph*: the period of many calls. *Eager*: the period of "
        "calls that the host enqueues one by one. These are times of the slowest rank, medians unless the column says "
        "p99. *Host*: the time until an eager call returns, of the median rank. *SMs*: blocks of the launch, one on "
        "each SM. *Window*: peer-visible memory of a rank. In `expert` and `batched`, each rank first adds up its rows "
        "of a token; the sum travels in bf16 by default, or in fp32 with `wire='exact'`. Rows of `batched` take the "
        "time of `expert` within 2 %, in a graph and alone; they are in [Calls and steps](docs/measured_calls.md):"
    )
    return [head, *tables]


def operations() -> str:
    """Return the table of the operations that have the three times, but those of the main README."""
    return table(COLUMNS, (row for name in found(*OPERATIONS) for row in rows_of(name)))


def rows_of(name: str, *, front: bool = False) -> list[str]:
    """Return the rows of one result; with `front` those of moecomm at the sizes of the main README."""
    result, lines = load(name), []
    case = result["case"]
    for row in result["rows"]:
        if "alone_us" not in row:
            continue
        ours = row["who"] == "moecomm"
        if ours and (row["payload"] not in ("fp8", "") or row["what"] == "pair"):
            continue
        is_front = ours and name.startswith("times-") and name.endswith(FRONT) and row["tokens"] in FRONT_TOKENS
        is_front &= row["layout"] != "batched"  # of which rows take the time of expert
        if (is_front and case["model"] == "deepseek-v3") != front:
            continue
        where = f"{case['ranks']} {gpu(result)}"
        lines.append(line(result, round_parts(row["tokens"], row["what"]), where, *_cells(result, row)))
    return lines


def _cells(result: dict[str, Any], row: dict[str, Any]) -> Iterable[str]:
    graph = result["case"]["mode"] == "graph"
    alone, eager = row["alone_us"], row.get("eager_us") if graph else row["us"]
    what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
    routing = result["case"].get("routing", {}).get("zipf", "")
    yield str(row["tokens"])
    yield f"{row['who']}, `{row['layout']}`" + (f", Zipf {routing}" if routing else "")
    yield what
    yield from (time_of(alone[part]) for part in ("p50", "p99"))
    yield time_of(row["us"]["p50"]) if graph else ""
    yield time_of(eager["p50"]) if eager else ""
    yield "" if row["host_us"] is None else time_of(row["host_us"])
    yield str(row["sms"] or "")
    yield _window(result, row)


def _window(result: dict[str, Any], row: dict[str, Any]) -> str:
    alike = {"tokens": row["tokens"], "layout": row["layout"]}
    if row["who"] != "moecomm":
        return ""
    return next((f"{m['window'] / 2**30:.1f} GiB" for m in result["memory"] if alike.items() <= m.items()), "")


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
            lines.append(line(result, round_parts(row["tokens"]), where, *cells, waits, window_of(row)))
    return table(heads, lines)


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
