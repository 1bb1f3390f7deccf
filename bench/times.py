"""Tables of three times for each operation: one call alone, many in a row, and eager; of decode and of training steps.

They are made of the results that have these times, one for each machine: `times-*`, `zipf-*`, `recorded-*`,
`symm-mem-*`, `decode-*` and `training-*`. Without any there is no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tables import (
    LAYER_CALLS,
    WINDOW,
    Topic,
    layer_parts,
    line,
    load,
    names,
    round_parts,
    table,
    time_of,
    where,
    window_in,
    window_of,
)

OPERATIONS = ("times", "zipf", "recorded", "symm-mem")
_GONE = ("torch-symm-mem",)  # libraries that the benchmark no longer measures
_LIBRARY = 2  # the column that names the library
_EAGER = (8, 9)  # the columns of eager times and host times, of operations and of layers
_SLOW = 1.2  # eager over graph: above it, the host alone does not explain the time
_TAIL = 1.5  # p99 over p50 of a decode step


def found(*kinds: str) -> list[str]:
    """Return the names of results of these kinds: KIND-..."""
    return [name for kind in kinds for name in names() if name.startswith(f"{kind}-")]


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
    """Return the tables of the operations that have the three times, and notes on them."""
    heads = (
        "GPUs | tokens a rank | library, layout | operation | alone, p50 | p90 | p99 | in a graph | eager | host | SMs"
    )
    used = found(*OPERATIONS)
    shown = by_machine(heads + WINDOW, used, rows_of)
    return "\n\n".join([shown, *(note for name in used for note in no_room(name))])


def by_machine(heads: str, used: Iterable[str], rows_of: Callable[[str], Iterable[str]]) -> str:
    """Return a table of results for each number of ranks and kind of GPU."""
    machines: dict[str, list[str]] = {}
    for name in used:
        machines.setdefault(where(load(name)), []).append(name)
    return "\n\n".join(table(heads, (row for name in some for row in rows_of(name))) for some in machines.values())


def rows_of(name: str) -> list[str]:
    """Return the rows of one result."""
    result, lines = load(name), []
    for row in result["rows"]:
        if "alone_us" not in row or row["who"] in _GONE:
            continue
        ours = row["who"] == "moecomm"
        if ours and row["what"] == "pair":
            continue
        parts = round_parts(row["tokens"], row["what"]) if ours else ()
        lines.append(line(result, parts, where(result), *_cells(result, row), at=(_LIBRARY,), eager=_EAGER * ours))
    return lines


def _cells(result: dict[str, Any], row: dict[str, Any]) -> Iterable[str]:
    graph = result["case"]["mode"] == "graph"
    alone, eager = row["alone_us"], row.get("eager_us") if graph else row["us"]
    what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
    routing, model = result["case"].get("routing"), result["case"]["model"]
    skew = "" if not routing else f", Zipf {routing['zipf']}" if "zipf" in routing else ", recorded routing"
    other = f", {model}" if model != "deepseek-v3" else ""
    yield str(row["tokens"])
    yield f"{row['who']}, `{row['layout']}`" + skew + other
    yield what
    yield from (time_of(alone[part]) for part in ("p50", "p90", "p99"))
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
    """Return the tables of expert layers."""
    heads = "GPUs | model | tokens a rank | layer | alone, p50 | p99 | in a graph | sustained | eager | host" + WINDOW
    return by_machine(heads, whole_layers(), _layers)


def _layers(name: str) -> Iterator[str]:
    result = load(name)
    for row in result["rows"]:
        if row["what"] != "layer" or row["who"] != "moecomm":
            continue
        alone = [time_of(row["alone_us"][part]) for part in ("p50", "p99")]
        others = (row["us"]["p50"], row["sustained_us"], row["eager_us"]["p50"], row["host_us"])
        cells = (str(row["tokens"]), row["variant"], *alone, *map(time_of, others), window_of(result, row))
        parts = (*layer_parts(row["tokens"]), *["forms"] * (row["variant"] == "default"))
        marks: dict[str, Any] = {"at": (1,), "eager": _EAGER, "called": LAYER_CALLS}
        yield line(result, parts, where(result), row["model"], *cells, **marks)


def decode() -> str:
    """Return the tables of decode steps: in step, and out of step."""
    heads = "GPUs | tokens a rank | layout, payload | experts | a token, p50 | p99 | out of step, p50 | p99 | waits"
    return "\n\n".join([by_machine(heads + WINDOW, found("decode"), _decode), *tails()])


def _decode(name: str) -> Iterator[str]:
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
        cells = (*cells, time_of(result["waits_us"]), window_of(result, row))
        yield line(result, round_parts(row["tokens"]), where(result), *cells, at=(_LIBRARY,))


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
    """Return the tables of training steps."""
    heads = f"model | GPUs | tokens a rank | step | moecomm | a layer | TFLOP/s | torch's{WINDOW}"
    return by_machine(heads, found("training"), _training)


def _training(name: str) -> Iterator[str]:
    result = load(name)
    for row in result["rows"]:
        if row["who"] == "moecomm" and "us" in row:
            times = (time_of(row["us"]["p50"]), time_of(row["layer_us"]), f"{row['tflops']:.0f}")
            torchs = f"{row['of_torch']:.2f}" if "of_torch" in row else ""
            parts = (*layer_parts(row["tokens"]), *LAYER_CALLS)  # eager
            cells = (where(result), str(row["tokens"]), row["what"], *times, torchs, window_of(result, row))
            yield line(result, parts, result["case"]["model"], *cells)


def topics() -> list[Topic]:
    """Return the topics that have results."""
    kinds: tuple[tuple[str, str, list[str], Callable[[], str]], ...] = (
        (
            "What one call costs",
            "Alone: a single call with caches flushed and ranks that start within a microsecond; nothing is "
            "subtracted.  In a graph, and eager: the period of many in a row.  Host: until a call returns.  "
            "Operations rotate among several inputs.",
            found(*OPERATIONS),
            operations,
        ),
        (
            "Expert layers",
            "`buffer.moe`: sequential is `fused=False`, which combines exactly; `bf16 wire` is the same with sums in "
            "bf16; one launch is `fused=True`; default is `fused=None`.  FP8: of weights, and of the rows that travel "
            "to them.  A graph has a few layers; sustained is the same for half a second.  Where the host takes longer "
            "than the device, an eager layer takes the time of the host: `fused=None` does not look at it.",
            whole_layers(),
            layers,
        ),
        (
            "Decode steps",
            "Layers of dispatch, experts and combine in one graph, from a common start.  Out of step: each rank comes "
            "late to each layer, at random; `waits` is what the latest of them add up to.",
            found("decode"),
            decode,
        ),
        (
            "Training steps",
            "Expert layers with residual connections through `moecomm.ops.moe`, eager.  `torch's`: all_to_all and "
            "grouped GEMMs with their gradients, over it.",
            found("training"),
            training,
        ),
    )
    return [Topic(title, about, " ".join(of), make) for title, about, of, make in kinds if of]
