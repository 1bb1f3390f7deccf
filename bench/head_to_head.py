"""The table and the plot of moecomm beside other libraries in the same run, at the top of the main README.

It is made of the result that has such rows with calls alone, `peers-*`: of the most GPUs, the latest.
"""

from __future__ import annotations

from typing import Any

from readme import ROUNDS, line, load, names, source, table, time_of
from times import gpu

from moecomm.bench import beside

_OTHERS = ("DeepEP V1", "DeepEP V2", "NCCL EP", "FlashInfer")
_WORDS = {"pair": "dispatch and combine"}
_COLUMNS = (
    f"GPUs | tokens a rank | layout | operation | moecomm | {' | '.join(_OTHERS)} | fastest of these over moecomm"
)


def found() -> str:
    """Return the name of the result of the most GPUs, of several the latest; empty without a result."""
    results = {name: load(name) for name in names()}
    of_peers = [name for name, result in results.items() if beside.has_peers(result)]
    return max(of_peers, key=lambda name: (results[name]["case"]["ranks"], results[name]["date"]), default="")


def front() -> list[str]:
    """Return paragraphs of the main README; none without a result."""
    used = found()
    if not used:
        return []
    head = (
        "DeepSeek-V3 (hidden 7168, top-8 of 256 experts), all libraries in the same run, each with the fastest of its "
        "settings. Times are of many calls in a captured graph and, in parentheses, of one call alone with caches "
        "flushed; medians of the slowest rank:"
    )
    notes = (
        "moecomm and the low-latency modes take bf16 and cast in the dispatch; the others take rows in FP8, and the "
        "cast is not counted. `batched`: DeepEP V1 low latency and NCCL EP low latency, expert-major. NCCL EP's other "
        "dispatches make their routing plan in each call, which is counted. FlashInfer's two calls are sure to end in "
        "turn only, so they are timed as a pair."
    )
    picture = f"![Dispatch and combine of moecomm and other libraries](bench/results/{used}.svg)"
    result = load(used)
    return [picture, head, table(_COLUMNS, _rows(result)), notes, f"{_versions(result)} {source([used])}"]


def _rows(result: dict[str, Any]) -> list[str]:
    lines = []
    for one in beside.operations(result):
        what = ", ".join(filter(None, (_WORDS.get(one.what, one.what), one.payload, one.variant)))
        times = [_time(one.best.get(name)) for name in ("moecomm", *_OTHERS)]
        where = f"{result['case']['ranks']} {gpu(result)}"
        lines.append(line(result, ROUNDS, where, str(one.tokens), f"`{one.layout}`", what, *times, f"{one.ratio:.2f}"))
    return lines


def _time(best: beside.Best | None) -> str:
    return "" if best is None else f"{time_of(best.us)} ({time_of(best.alone_us)})"


def _versions(result: dict[str, Any]) -> str:
    words = {"deep_ep": "DeepEP", "nccl_ep": "NCCL EP", "flashinfer": "FlashInfer"}
    shown = (f"{words.get(name, name)} {version}" for name, version in result["libraries"].items())
    return f"Versions: {', '.join(shown)}."
