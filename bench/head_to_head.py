"""moecomm beside other libraries in the same run: the picture and short table of README, and the whole table.

They are made of results that have such rows with calls alone.  README shows `peers-*`: of the most GPUs, the latest.
"""

from __future__ import annotations

from typing import Any

from tables import (
    AGED,
    OLDER,
    WINDOW,
    line,
    load,
    names,
    of_kind,
    round_parts,
    source,
    table,
    time_of,
    where,
    window_in,
)

from moecomm_bench import beside
from moecomm_bench.deep_ep import NOT_COPIED

_WORDS = {"pair": "dispatch and combine"}
_OVER = "fastest of these over moecomm"
_RATIOS = (_OVER, "alone", "eager")
_BEST = "moecomm, best number of SMs"
_COPIED = (
    "- DeepEP V2 copies `topk_idx` in each dispatch of this run, which takes it a small kernel: its default, "
    "`do_handle_copy`. The benchmark now leaves the copy out, as moecomm's dispatch makes none."
)


def found() -> str:
    """Return the name of the result of the most GPUs, of several the latest; empty without a result."""
    results = {name: load(name) for name in of_kind(names(), "peers")}
    of_peers = [name for name, result in results.items() if beside.has_peers(result)]
    return max(of_peers, key=lambda name: (results[name]["case"]["ranks"], results[name]["date"]), default="")


def front() -> list[str]:
    """Return paragraphs of the main README: picture, short table, sources."""
    used = found()
    result = load(used)
    others = [name for name in beside.libraries(result) if name != "moecomm"]
    lines = []
    for one in beside.operations(result):
        if one.payload not in beside.MAIN or not {*others} & {*one.best} or (one.tokens, one.layout) == (128, "expert"):
            continue
        times = [time_of(one.able[name].us) if name in one.able else "" for name in ("moecomm", *others)]
        cells = (str(one.tokens), beside.words(one), *times)
        lines.append(line(result, round_parts(one.tokens, one.what), *cells, at=(2,)))
    shown = table(" | ".join(("tokens a GPU", "operation", "moecomm", *others)), lines)
    case = result["case"]
    head = (
        f"{where(result)} on {result['date']}, with moecomm's kernels of that day, DeepSeek-V3's sizes "
        f"(hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts), all libraries in one run: time "
        "of the slowest GPU, in a CUDA graph. Left of 1, the other library is faster. "
        f"{' and '.join(beside.REGISTERED)} read registered memory alone, DeepEP any tensor."
    )
    about = f"Source: {source(used, 'bench/results')}."
    if OLDER in shown:
        about += f" {AGED}"
    picture = f"![Time of other libraries over that of moecomm](bench/results/{used}.svg)"
    more = "[Measurements](docs/measurements.md) has all sizes and layouts, the conditions, and the marks in full."
    return [picture, head, shown, f"{about} {more}"]


def others(used: str) -> str:
    """Return the table of all operations that moecomm and another library have, with notes and versions."""
    result = load(used)
    head = (
        "All libraries in one run. A time is the period of many calls in a captured graph; in parentheses, the time of "
        "one call alone with caches flushed, and the number of SMs where the library has one to set: moecomm's is that "
        "of its table, another library's the fastest of those tried. Both are medians of the slowest rank. The ratio "
        "divides the graph time of the fastest other library by moecomm's: below 1, that library is faster. The last "
        "two are the same ratio of calls alone and of eager calls. "
        f"{_sms_of_deep_ep(result)} {_sms_of_nccl_ep(result)} FlashInfer runs with its defaults. UCCL-EP was not "
        "measured: the benchmark has no adapter for it, and its CPU proxies need a network, which these machines "
        "lack. torch's all-to-all over symmetric memory was not measured either: torch 2.11 takes at most 15 experts "
        "a rank there, and a rank has more here:"
    )
    notes = (
        "- `y in the window`: experts wrote `y` to memory from `buffer.empty()`, so combine does not copy it. `y "
        "outside`: any other tensor. Other libraries have one time, which stands and counts in both rows. NCCL EP and "
        "FlashInfer read registered memory: compare them with `y in the window`. DeepEP reads any tensor: compare it "
        "with `y outside`.\n"
        "- FP8 dispatch: moecomm, DeepEP V1 low latency and NCCL EP low latency take bf16 and cast. The others take "
        "rows in FP8, and the cast is not timed.\n"
        "- `batched` has the low-latency kernels of DeepEP V1 and NCCL EP (expert-major); `flat` and `expert` have "
        "their high-throughput kernels, with 128 tokens, too. The low-latency kernels return one bf16 row for each "
        "(token, expert), so they round no partial sum; moecomm returns one rounded sum for each (token, rank) by "
        "default. `wire='exact'`, which rounds once, is in [Calls and "
        "steps](maintainers/measured_calls.md).\n"
        "- A dispatch includes its routing plan: `get_dispatch_layout` of DeepEP V1, `ncclEpUpdateHandle` of NCCL EP "
        "high throughput.\n"
        "- FlashInfer has one time for dispatch and combine, because its calls must alternate."
    )
    if not any(row["who"] == "deep_ep elastic" and NOT_COPIED in row["variant"] for row in result["rows"]):
        notes += f"\n{_COPIED}"
    return "\n\n".join([head, shown(used), notes, _versions(result)])


def shown(used: str) -> str:
    """Return the table of all operations that moecomm and another library have in a result."""
    result = load(used)
    whos = [name for name in beside.libraries(result) if name != "moecomm"]
    columns = ("GPUs", "tokens a rank", "layout", "operation", "moecomm", *_more(result), *whos, *_RATIOS)
    return table(" | ".join(columns) + WINDOW, _rows(result, whos))


def _sms_of_deep_ep(result: dict[str, Any]) -> str:
    """Say with how many SMs DeepEP runs, and in which rows it has no run with as many as moecomm."""
    lacking: dict[str, list[str]] = {}
    for one in beside.operations(result):
        alike = {"tokens": one.tokens, "layout": one.layout, "what": one.what, "payload": one.payload}
        rows = [row for row in result["rows"] if "us" in row and alike.items() <= row.items()]
        ours = one.best["moecomm"].sms
        theirs = {row["sms"] for row in rows if row["who"] in ("deep_ep", "deep_ep elastic")}
        if theirs and ours not in theirs:
            what = " of ".join(filter(None, (one.what, one.payload or one.variant)))
            lacking.setdefault(f"{one.tokens} tokens, `{one.layout}`, moecomm by {ours} SMs", []).append(what)
    said = "DeepEP runs with the SMs of its tests and with those of moecomm's dispatch of this size in `flat`"
    if not lacking:
        return "DeepEP runs with the SMs of its tests and with moecomm's, and the fastest counts."
    missing = "; ".join(f"{where}: {', '.join(of)}" for where, of in lacking.items())
    return f"{said}, and the fastest counts. It has no run with the SMs of moecomm in these rows ({missing})."


def _sms_of_nccl_ep(result: dict[str, Any]) -> str:
    """Say with how many SMs the high-throughput kernels of NCCL EP run."""
    ours = {row["sms"] for row in result["rows"] if "us" in row and row["who"] in ("nccl_ep", "nccl_ep expert-major")}
    numbers = ", ".join(map(str, sorted(ours)))
    more = "and the fastest counts" if len(ours) > 1 else "its default; other numbers were not tried in this run"
    return f"NCCL EP's high-throughput kernels run with {numbers} SMs, {more}."


def _more(result: dict[str, Any]) -> list[str]:
    """Return the head of moecomm's best numbers of SMs, if several were measured."""
    return [_BEST] * any(one.ours for one in beside.operations(result))


def _rows(result: dict[str, Any], others: list[str]) -> list[str]:
    lines = []
    for one in beside.operations(result):
        what = ", ".join(filter(None, (_WORDS.get(one.what, one.what), one.payload, one.variant)))
        ours = [_time(one.best["moecomm"]), *(_time(one.ours) for _ in _more(result))]
        times = [*ours, *(_time(one.best.get(name)) for name in others)]
        model = result["case"]["model"]
        machine = f"{where(result)}{f', {model}' if model != 'deepseek-v3' else ''}"
        ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (one.ratio, *one.ratios))
        cells = (machine, str(one.tokens), f"`{one.layout}`", what, *times, *ratios)
        cells = (*cells, window_in(result, one.tokens, one.layout))
        lines.append(line(result, round_parts(one.tokens, one.what), *cells, at=range(4, 4 + len(ours))))
    return lines


def _time(best: beside.Best | None) -> str:
    if best is None:
        return ""
    return f"{time_of(best.us)} ({time_of(best.alone_us)}{f'; {best.sms} SMs' if best.sms else ''})"


def _versions(result: dict[str, Any]) -> str:
    words = {"deep_ep": "DeepEP", "nccl_ep": "NCCL EP", "flashinfer": "FlashInfer"}
    shown = (f"{word} {result['libraries'][name]}" for name, word in words.items() if name in result["libraries"])
    return f"Versions: {', '.join(shown)}."
