"""The table of each benchmark: what its columns are called, and which entries of a row they have."""

from __future__ import annotations

from itertools import chain
from typing import Any

from rich.console import Console

from moecomm_bench import beside, proxy_times, replay
from moecomm_bench.columns import Column, Result, Row, Table, joined, show_plain, show_rows

_TOKENS, _MODEL, _BY = Column("tokens", "tokens"), Column("model", "model"), Column("by", "who")
_OPERATION = Column("operation", joined("layout", "what", "payload", "variant"))
_SMS = Column("SMs", lambda row: row["sms"] or None)
_HOST = Column("host us", "host_us", "{:.1f}")
_TFLOPS = Column("TFLOP/s", "tflops", "{:.0f}")
_WINDOW = Column("window MiB", lambda row: _mib(row.get("opened_bytes", row.get("window_bytes"))), "{:.0f}")
_GBS = Column("GB/s", "gbs", "{:.2f}")


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def _times(entry: str, *parts: str, heads: str, digits: int = 1) -> list[Column]:
    """Return columns of percentiles; `heads` has a comma between two headings."""
    form = f"{{:.{digits}f}}"
    return [Column(head, f"{entry}.{part}", form) for part, head in zip(parts, heads.split(","), strict=True)]


_US = _times("us", "p50", "p90", "p99", heads="p50,p90,p99 us")
_TWO = _times("us", "p50", "p90", heads="p50,p90 us")


def _sizes(result: Result, ranks: bool = True) -> str:
    case = result["case"]
    name = f"{case['model']}: " if case["model"] else ""
    where = f"{case['ranks']} ranks" + (f", {result['backend']}" if ranks else "")
    return f"{name}hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts; {where}"


def _mode(case: dict[str, Any]) -> str:
    mode = "one by one" if case["backend"] == "host" else f"{case['mode']} of several"
    skewed = f"; {case['skew']:.0%} of the tokens want rank 0" if case["skew"] else ""
    return f"{mode}, {'caches flushed' if case['cold'] else 'chained'}{skewed}{replay.said(case)}"


def _said(result: Result) -> str:
    return replay.said(result["case"])


def _rounds(result: Result) -> str:
    case, limits = result["case"], result["ceiling"]
    lines = [f"{_sizes(result)}; {_mode(case)}; median of {case['replays']}, slowest rank"]
    if limits:
        best, kind = limits[0], beside.ceiling_is(result["rows"])  # older results do not say it
        by = f"{best['method']}, {best['sms']} SMs or threads"
        lines.append(f"all-to-all {kind}: {best['gbs']:.1f} GB/s a rank ({by})")
    for memory in result["memory"]:
        layout = f", {memory['layout']}" if "layout" in memory else ""
        # The window of the run has room for the inputs of the benchmark; older results lack it.
        opened = f"; opened here {memory['opened'] / 2**20:.1f} MiB" if "opened" in memory else ""
        lines.append(
            f"{memory['tokens']} tokens{layout}: a caller's window {memory['window'] / 2**20:.1f} MiB, "
            f"{memory['beyond_outputs'] / 2**20:.1f} MiB of it beside room for outputs{opened}"
        )
    return "\n".join(lines)


def _beside(row: Row) -> str:
    """Return ratios to other rows, and what a matmul beside the operation keeps."""
    words = [f"{row[entry]:.2f} {entry.replace('_', ' ')}" for entry in ("of_sum", "of_flat") if entry in row]
    if "kept" in row.get("overlap", {}):
        words.append(f"GEMM {row['overlap']['kept']:.0%}")
    if "halves" in row:
        halves, gemm, together = (row["halves"][name] for name in ("halves", "gemm", "together"))
        words.append(f"{(halves + gemm - together) / min(halves, gemm):.0%} hidden between halves")
    return ", ".join(words)


def _more_rounds(result: Result, out: Console) -> None:
    for why in dict.fromkeys(row["overlap"]["why"] for row in result["rows"] if "why" in row.get("overlap", {})):
        out.print(f"no matmul beside operations: {why}", style="dim", markup=False)
    _show_singles(result, out)


def _show_singles(result: Result, out: Console) -> None:
    """Print the times of rows that have those of single calls; nothing without any."""
    if why := result.get("alone", {}).get("why"):
        out.print(f"no single calls: {why}", style="dim", markup=False)
    rows = [row for row in result["rows"] if "alone_us" in row]
    if not rows:
        return
    single, graph = result["alone"], result["case"]["mode"] == "graph"
    floor = ""
    if single["floor_us"] is not None:
        floor = f"; no work at all takes {single['floor_us']['p50']:.2f} us, the clock steps by {single['step_ns']} ns"
    out.print(
        f"alone: {single['calls']} single calls, caches flushed, ranks start together{floor}; period: of many in a "
        f"{'graph' if graph else 'row'}",
        highlight=False,
        markup=False,
    )
    labels = (_TOKENS, _BY, Column("operation", joined("model", "layout", "what", "payload", "variant")))
    columns = [*_times("alone_us", "p50", "p90", "p99", heads="alone p50,p90,p99 us")]
    columns += _times("us", "p50", "p90", "p99", heads="period p50,p90,p99 us")
    columns += _times("eager_us" if graph else "us", "p50", "p99", heads="eager p50,p99 us")
    show_rows(rows, labels, [*columns, _HOST], out)


def _backends(result: Result) -> str:
    case = result["case"]
    if not case:
        return "no backend has been measured"
    return (
        f"{_sizes(result, ranks=False)}; {case['mode']}; median of {case['replays']}, slowest rank; bytes that "
        f"leave a rank, on average; of first: time over that of the first backend{_said(result)}"
    )


def _of_backends(result: Result) -> list[Row]:
    ranks = result["case"].get("ranks", 0)
    return [row | {"domains": ranks // (row["domain_ranks"] or ranks)} if ranks else row for row in result["rows"]]


def _moved(where: str) -> list[Column]:
    megabytes = Column(f"{where} MB", lambda row: row[f"{where}_bytes"] / 1e6, "{:.1f}")
    return [megabytes, Column("GB/s", f"{where}_gbs", "{:.1f}")]


def _show_proxy(result: Result, out: Console) -> None:
    rows = [row for row in result["rows"] if "plugin" in row]
    if rows:
        out.print(f"{proxy_times.EXPLAINED}:", highlight=False, markup=False)
        show_rows(rows, proxy_times.LABELS, proxy_times.FIGURES, out)


def _gemm(result: Result) -> str:
    read = f"; torch's sum reads {result['read_tbs']:.2f} TB/s" if "read_tbs" in result else ""
    return (
        f"grouped GEMMs of a rank's experts, {result['dtype']}, {result['device']}; median of "
        f"{result['replays']}; torch's has no activation{read}"
    )


def _decode(result: Result) -> str:
    return (
        f"{_sizes(result)}; {result['layers']} layers a step, {result['alone']['calls']} steps, ranks start together; "
        f"stand-in: {result['expert_us']:g} us; out of step: ranks come 0 to {result['delay_us']:g} us late to each "
        f"layer, {result['waits_us']:.0f} us a step in all{_said(result)}"
    )


def _of_both(entry: str, part: str) -> list[Column]:
    name = {"us.": "", "host_us.": "host "}[entry]
    return [Column(f"{by} {name}us", f"{entry}{by}{part}", "{:.1f}") for by in ("native", "compat")]


def _study(row: Row) -> Row:
    """Return the row of a variant with the figures of its source as entries of its own, and ours in milliseconds."""
    ours = {"ms": row["us"]["p50"] / 1e3} if "us" in row else {}
    shown = {**row, **ours, **{f"source_{name}": value for name, value in (row["source"] or {}).items()}}
    for name in ("tflops", "source_tflops"):  # with two digits where there are few
        if name in shown:
            shown[name] = f"{shown[name]:.{2 if shown[name] < 10 else 1}f}"
    return shown


def _errors(result: Result, out: Console) -> None:
    from moecomm_bench.simulate.table import show_check

    show_check(result, out)


def _predictions(result: Result, out: Console) -> None:
    from moecomm_bench.simulate.table import show_predictions

    show_predictions(result, out)


TABLES: dict[str, Table] = {
    "dispatch-combine": Table(
        _rounds,
        (_TOKENS, _BY, _OPERATION),
        (
            *(_SMS, *_US, Column("wire", "wire_gbs", "{:.1f}"), Column("logical GB/s", "logical_gbs", "{:.1f}")),
            *(Column("of wire", "of_wire", "{:.3f}"), _HOST, Column("beside", _beside)),
        ),
        _more_rounds,
    ),
    "backends": Table(
        _backends,
        (
            *(_TOKENS, Column("through", lambda row: row.get("through", row["backend"])), _OPERATION),
            Column("domains", "domains"),
        ),
        (
            *(Column("SMs", "sms"), *_TWO, Column("of first", "of_first", "x{:.3f}")),
            *(*_moved("inside"), *_moved("across"), _HOST, _WINDOW),
        ),
        rows=_of_backends,
    ),
    "latency": Table(
        lambda result: f"put + signal between two ranks, {result['backend']}: half a round trip",
        (Column("bytes", "bytes"), Column("by", "method")),
        (Column("SMs", "sms"), *_times("us", "p50", "p90", "p99", heads="p50,p90,p99 us", digits=2), _GBS),
        _show_proxy,
    ),
    "latency-backends": Table(
        lambda result: "put + signal between two ranks: half a round trip",
        (Column("bytes", "bytes"), Column("through", "backend"), Column("by", "method")),
        (Column("SMs", "sms"), *_times("us", "p50", "p90", heads="p50,p90 us", digits=2), _GBS),
        _show_proxy,
    ),
    "all-to-all": Table(
        lambda result: (
            f"all-to-all between {result['ranks']} ranks, {result['backend']}: bytes that leave a rank, over "
            "the time of the slowest"
        ),
        (Column("by", "method"),),
        (
            *(Column("SMs or threads", lambda row: row["sms"] or None), Column("p50 us", "us.p50", "{:.1f}")),
            Column("GB/s", "gbs", "{:.1f}"),
        ),
    ),
    "gemm": Table(
        _gemm,
        (
            *(_MODEL, Column("GEMM", joined("gemm", "activation", "dtype")), Column("ranks", "ranks"), _TOKENS),
            *(Column("rows", "rows"), Column("schedule", "chosen")),
        ),
        (
            *(Column("us", lambda row: row["us"][row["chosen"]], "{:.1f}"), _TFLOPS, Column("TB/s", "tbs", "{:.2f}")),
            *(Column("torch us", "us.torch", "{:.1f}"), Column("of torch", "of_torch", "x{:.2f}")),
            Column("host us", lambda row: row["host_us"][row["chosen"]] if row["host_us"] else None, "{:.1f}"),
        ),
    ),
    "moe": Table(
        lambda result: (
            f"expert layers in bf16, {result['case']['ranks']} ranks, {result['backend']}, "
            f"{result['case']['mode']}; median of {result['case']['replays']}, slowest rank; of GEMMs: beside "
            f"ours alone; of torch: as many times as fast{_said(result)}"
        ),
        (_MODEL, _TOKENS, _BY, Column("what", joined("what", "variant"))),
        (
            *(*_times("us", "p50", "p90", heads="p50,p90"), Column("sustained us", "sustained_us", "{:.1f}"), _TFLOPS),
            *(Column("of GEMMs", "of_gemms", "{:.2f}"), Column("of torch", "of_torch", "x{:.2f}"), _HOST, _WINDOW),
        ),
        _show_singles,
    ),
    "overlap": Table(
        lambda result: (
            f"fused operators, {result['ranks']} ranks, {result['backend']}, graph; median of "
            f"{result['replays']}, slowest rank; speedup: of ours over this; of alone: time beside the product without "
            "communication"
        ),
        (
            *(Column("operator", "operator"), Column("case", "case"), Column("dtype", "dtype")),
            Column("by", lambda row: ": ".join(filter(None, (row["who"], row.get("form"))))),
        ),
        (*_TWO, _TFLOPS, Column("speedup", "speedup", "x{:.2f}"), Column("of alone", "of_alone", "x{:.2f}")),
    ),
    "all-gather-study": Table(
        lambda result: (
            f"all-gather and matmul, {result['size']} x {result['size']} x {result['size']}, "
            f"{result['dtype']}, {result['ranks']} ranks, {result['backend']}, graph; median of "
            f"{result['replays']}, slowest rank; source: NVIDIA/Fuser pull request 6002, 8 H100s; of 1: TFLOP/s over "
            "those of variant 1"
        ),
        (Column("", "variant"), Column("variant", "name"), Column("class", "kind")),
        tuple(
            chain.from_iterable(
                (
                    Column(f"{prefix.replace('_', ' ')}ms", f"{prefix}ms", "{:.3f}"),
                    Column("TFLOP/s", f"{prefix}tflops"),
                    Column("of 1", f"{prefix}of_first", "x{:.2f}"),
                )
                for prefix in ("", "source_")
            )
        ),
        rows=lambda result: [_study(row) for row in result["rows"]],
    ),
    "decode": Table(
        _decode,
        (
            *(_TOKENS, Column("layout", "layout"), Column("payload", "payload"), Column("experts", "experts")),
            Column("ranks", lambda row: "out of step" if row["delays"] else "in step"),
        ),
        (
            *_times("us", "p50", "p90", "p99", heads="step p50,p90,p99 us", digits=0),
            *(Column("layer us", "layer_us", "{:.1f}"), _WINDOW),
            Column("of it beside experts and waits", "beside_us", "{:.1f}"),
        ),
    ),
    "training": Table(
        lambda result: (
            f"{_sizes(result)}; {result['layers']} layers a step with {result['intermediate']} columns inside an "
            f"expert, eager; median of {result['case']['replays']}, slowest rank; of torch: as many times as fast"
            f"{_said(result)}"
        ),
        (_TOKENS, _BY, Column("what", "what")),
        (
            *_times("us", "p50", "p90", heads="step p50,p90 us", digits=0),
            *(Column("layer us", "layer_us", "{:.0f}"), _TFLOPS, Column("of torch", "of_torch", "x{:.2f}"), _WINDOW),
        ),
    ),
    "deep-ep-layer": Table(
        lambda result: (
            f"{_sizes(result)}; {_mode(result['case'])}; median of {result['case']['replays']}, slowest rank; host: "
            "until a call returns"
        ),
        (_TOKENS, Column("operation", joined("what", "payload", "variant"))),
        (
            *(*_of_both("us.", ".p50"), Column("of native", "of_native", "x{:.3f}"), *_of_both("host_us.", "")),
            *(
                Column("more on the host us", "host_more_us", "{:+.1f}"),
                Column("at p99", "host_p99_more_us", "{:+.1f}"),
            ),
            *(Column("native again, at p99", "host_p99_again_us", "{:+.1f}"), _WINDOW),
        ),
    ),
}
_OTHER = {"simulate": _predictions, "simulate-check": _errors}  # of several tables


def show(result: Result, out: Console) -> None:
    """Print the table of a result of any benchmark, for those without one of their own its rows as they are."""
    benchmark = result.get("benchmark", "")
    if benchmark in TABLES:
        TABLES[benchmark].show(result, out)
    elif benchmark in _OTHER:
        _OTHER[benchmark](result, out)
    else:
        medians = [{"by": by, **of} for by, of in result.get("medians", {}).items()]
        show_plain(result.get("rows") or medians, out)
