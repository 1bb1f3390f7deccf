"""Tables of benchmark results for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moecomm.tools.fitted import new_table, show_table
from moecomm_bench import beside, proxy_times, replay

_PARTS = ("p50", "p90", "p99")
_WIDE = 132  # columns of a table in a file or a pipe


def console() -> Console:
    """Return standard output, as wide as the terminal; without one, wide enough for a table."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, _WIDE))


def show_dispatch_combine(result: dict[str, Any], out: Console) -> None:
    """Print the tables of dispatch-combine and sweep."""
    case, limits = result["case"], result["ceiling"]
    name = f"[bold]{case['model']}[/]: " if case["model"] else ""
    out.print(
        f"{name}hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts; {case['ranks']} ranks, "
        f"{result['backend']}; {_mode(case)}; median of {case['replays']}, slowest rank",
        highlight=False,
    )
    if limits:
        kind = beside.ceiling_is(result["rows"])  # older results do not say it
        out.print(
            f"all-to-all {kind}: [bold]{limits[0]['gbs']:.1f} GB/s[/] a rank ({limits[0]['method']}, "
            f"{limits[0]['sms']} SMs or threads)",
            highlight=False,
        )
    for memory in result["memory"]:
        layout = f", {memory['layout']}" if "layout" in memory else ""
        out.print(
            f"{memory['tokens']} tokens{layout}: a caller's window {memory['window'] / 2**20:.1f} MiB, "
            f"{memory['beyond_outputs'] / 2**20:.1f} MiB of it beside room for outputs{_opened(memory)}",
            highlight=False,
        )
    table = new_table(
        ("tokens", "by", "operation"),
        ("SMs", "p50", "p90", "p99 us", "wire", "logical GB/s", "of wire", "host us", "beside"),
    )
    for row in result["rows"]:
        what = " ".join(filter(None, (row[key] for key in ("layout", "what", "payload", "variant"))))
        table.add_row(str(row["tokens"]), row["who"], what, *(["-"] * 8 if "why" in row else _figures(row)))
    show_table(table, out)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['tokens']} tokens, {row['who']} {row['what']}: {row['why']}", style="dim", markup=False)
    for why in dict.fromkeys(row["overlap"]["why"] for row in result["rows"] if "why" in row.get("overlap", {})):
        out.print(f"no matmul beside operations: {why}", style="dim", markup=False)
    _show_times(result, out)


def _show_times(result: dict[str, Any], out: Console) -> None:
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
    )
    table = new_table(
        ("tokens", "by", "operation"),
        ("alone p50", "p90", "p99 us", "period p50", "p90", "p99 us", "eager p50", "p99 us", "host us"),
    )
    for row in rows:
        about = (row.get(key) for key in ("model", "layout", "what", "payload", "variant"))
        what = " ".join(filter(None, about))
        eager = row.get("eager_us", {} if graph else row["us"])
        table.add_row(
            *(str(row["tokens"]), row["who"], what),
            *(f"{row[name][part]:.1f}" for name in ("alone_us", "us") for part in _PARTS),
            *(f"{eager[part]:.1f}" if eager else "" for part in ("p50", "p99")),
            "" if row["host_us"] is None else f"{row['host_us']:.1f}",
        )
    show_table(table, out)


def _mode(case: dict[str, Any]) -> str:
    mode = "one by one" if case["backend"] == "host" else f"{case['mode']} of several"
    skewed = f"; {case['skew']:.0%} of the tokens want rank 0" if case["skew"] else ""
    return f"{mode}, {'caches flushed' if case['cold'] else 'chained'}{skewed}{escape(replay.said(case))}"


def _opened(memory: dict[str, Any]) -> str:
    """Return the window of the run, which has room for the inputs of the benchmark; older results lack it."""
    return f"; opened here {memory['opened'] / 2**20:.1f} MiB" if "opened" in memory else ""


def _figures(row: dict[str, Any]) -> list[str]:
    us = row["us"]
    more = []
    if "of_sum" in row:
        more.append(f"{row['of_sum']:.2f} of sum")
    if "of_flat" in row:
        more.append(f"{row['of_flat']:.2f} of flat")
    if "kept" in row.get("overlap", {}):
        more.append(f"GEMM {row['overlap']['kept']:.0%}")
    if "halves" in row:
        halves, gemm, together = (row["halves"][name] for name in ("halves", "gemm", "together"))
        more.append(f"{(halves + gemm - together) / min(halves, gemm):.0%} hidden between halves")
    return [
        str(row["sms"] or ""),
        *(f"{us[part]:.1f}" for part in ("p50", "p90", "p99")),
        f"{row['wire_gbs']:.1f}",
        f"{row['logical_gbs']:.1f}",
        "" if row["of_wire"] is None else f"{row['of_wire']:.3f}",
        "" if row["host_us"] is None else f"{row['host_us']:.1f}",
        ", ".join(more),
    ]


def show_latency(result: dict[str, Any], out: Console) -> None:
    """Print the table of latency."""
    out.print(f"put + signal between two ranks, {result['backend']}: half a round trip", highlight=False)
    table = new_table(("bytes", "by"), ("SMs", "p50", "p90", "p99 us", "GB/s"))
    for row in result["rows"]:
        us = [f"{row['us'][part]:.2f}" for part in ("p50", "p90", "p99")]
        table.add_row(str(row["bytes"]), row["method"], str(row["sms"]), *us, f"{row['gbs']:.2f}")
    show_table(table, out)
    _show_proxy(result["rows"], out)


def _show_proxy(rows: list[dict[str, Any]], out: Console) -> None:
    cells = proxy_times.table(rows)
    if not cells:
        return
    out.print(f"{proxy_times.EXPLAINED}:", highlight=False, markup=False)
    table = new_table(cells[0][:2], cells[0][2:])
    for line in cells[1:]:
        table.add_row(*line)
    show_table(table, out)


def show_backends(result: dict[str, Any], out: Console) -> None:
    """Print the table of dispatch-combine through several backends."""
    case, first = result["case"], result["ways"][0]["backend"]
    if case:
        name = f"[bold]{case['model']}[/]: " if case["model"] else ""
        out.print(
            f"{name}hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts; {case['ranks']} ranks; "
            f"{case['mode']}; median of {case['replays']}, slowest rank; bytes that leave a rank, on average"
            f"{escape(replay.said(case))}",
            highlight=False,
        )
    figures = ("p50", "p90 us", f"of {first}", "inside MB", "GB/s", "across MB", "GB/s", "host us", "window MiB")
    table = new_table(("tokens", "through", "operation"), ("domains", "SMs", *figures))
    for row in result["rows"]:
        if "why" in row:
            continue
        what = " ".join(filter(None, (row[key] for key in ("layout", "what", "payload", "variant"))))
        table.add_row(
            str(row["tokens"]),
            row["through"],
            what,
            str(case["ranks"] // (row["domain_ranks"] or case["ranks"])),
            str(row["sms"]),
            *(f"{row['us'][part]:.1f}" for part in ("p50", "p90")),
            f"x{row['of_first']:.3f}" if "of_first" in row else "",
            *(f"{row[f'{where}_{unit}'] / by:.1f}" for where in ("inside", "across") for unit, by in _MB_AND_GBS),
            "" if row["host_us"] is None else f"{row['host_us']:.1f}",
            window_mib(row),
        )
    show_table(table, out, names=4)
    _say_why(result, out)


_MB_AND_GBS = (("bytes", 1e6), ("gbs", 1))


def _say_why(result: dict[str, Any], out: Console) -> None:
    for row in result["rows"]:
        if "why" in row:
            domains = f", domains of {row['domain_ranks']}" if row["domain_ranks"] else ""
            size = f", {row['tokens']} tokens" if row.get("tokens") else ""
            operation = "".join(f" {row[key]}" for key in ("layout", "what", "payload", "variant") if row.get(key))
            out.print(f"{row['backend']}{domains}{size}{operation}: {row['why']}", style="dim", markup=False)


def show_latency_backends(result: dict[str, Any], out: Console) -> None:
    """Print the table of latency through several backends."""
    out.print("put + signal between two ranks: half a round trip, us (GB/s)", highlight=False)
    names = [way["backend"] for way in result["ways"]]
    found = {(row["bytes"], row["backend"]): row for row in result["rows"] if "us" in row}
    table = new_table(("bytes", *names))
    for size in sorted({size for size, _ in found}):
        cells = [found.get((size, name)) for name in names]
        table.add_row(
            str(size), *("" if row is None else f"{row['us']['p50']:.2f} ({row['gbs']:.2f})" for row in cells)
        )
    show_table(table, out)
    _show_proxy(result["rows"], out)
    _say_why(result, out)


def show_all_to_all(result: dict[str, Any], out: Console) -> None:
    """Print the table of all-to-all."""
    out.print(
        f"all-to-all between {result['ranks']} ranks, {result['backend']}: bytes that leave a rank, over the time of "
        "the slowest",
        highlight=False,
    )
    table = new_table(("by",), ("SMs or threads", "p50 us", "GB/s"))
    for row in result["rows"]:
        table.add_row(row["method"], str(row["sms"] or ""), f"{row['us']['p50']:.1f}", f"{row['gbs']:.1f}")
    show_table(table, out)


def show_gemm(result: dict[str, Any], out: Console) -> None:
    """Print the table of gemm."""
    read = f"; torch's sum reads {result['read_tbs']:.2f} TB/s" if "read_tbs" in result else ""
    out.print(
        f"grouped GEMMs of a rank's experts, {result['dtype']}, {result['device']}; median of {result['replays']}; "
        f"torch's has no activation{read}",
        highlight=False,
    )
    table = new_table(("model", "GEMM"), ("ranks", "tokens", "rows"))
    table.add_column("schedule", no_wrap=True)
    for column in ("us", "TFLOP/s", "TB/s", "torch us", "of torch", "host us"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        host, us = row["host_us"], row["us"]
        table.add_row(
            row["model"],
            " ".join(filter(None, (str(row["gemm"]), row["activation"], row["dtype"]))),
            *(str(row[key]) for key in ("ranks", "tokens", "rows", "chosen")),
            *(f"{us[row['chosen']]:.1f}", f"{row['tflops']:.0f}", f"{row['tbs']:.2f}"),
            *((f"{us['torch']:.1f}", f"x{row['of_torch']:.2f}") if "torch" in us else ("", "")),
            f"{host[row['chosen']]:.1f}" if host else "",
        )
    show_table(table, out, names=4)


def show_moe(result: dict[str, Any], out: Console) -> None:
    """Print the table of moe."""
    case = result["case"]
    out.print(
        f"expert layers in bf16, {case['ranks']} ranks, {result['backend']}, {case['mode']}; median of "
        f"{case['replays']}, slowest rank; of GEMMs: beside ours alone; of torch: as many times as fast"
        f"{escape(replay.said(case))}",
        highlight=False,
    )
    table = new_table(
        ("model", "tokens", "by", "what"),
        ("p50", "p90", "sustained us", "TFLOP/s", "of GEMMs", "of torch", "host us", "window MiB"),
    )
    for row in result["rows"]:
        about = (row["model"], str(row["tokens"]), row["who"], " ".join(filter(None, (row["what"], row["variant"]))))
        if "why" in row:
            table.add_row(*about, *["-"] * 8)
            continue
        table.add_row(
            *about,
            *(f"{row['us'][part]:.1f}" for part in ("p50", "p90")),
            f"{row['sustained_us']:.1f}" if "sustained_us" in row else "",
            "" if row["tflops"] is None else f"{row['tflops']:.0f}",
            f"{row['of_gemms']:.2f}" if "of_gemms" in row else "",
            f"x{row['of_torch']:.2f}" if "of_torch" in row else "",
            "" if row["host_us"] is None else f"{row['host_us']:.1f}",
            window_mib(row),
        )
    show_table(table, out, names=4)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['tokens']} tokens, {row['who']} {row['what']}: {row['why']}", style="dim", markup=False)
    _show_times(result, out)


def show_deep_ep_layer(result: dict[str, Any], out: Console) -> None:
    """Print the table of deep-ep-layer."""
    case = result["case"]
    out.print(
        f"hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts; {case['ranks']} ranks, "
        f"{result['backend']}; {_mode(case)}; median of {case['replays']}, slowest rank; host: until a call returns",
        highlight=False,
    )
    table = new_table(
        ("tokens", "operation"),
        (
            "native us",
            "compat us",
            "of native",
            "native host us",
            "compat host us",
            "more on the host us",
            "at p99",
            "native again, at p99",
            "window MiB",
        ),
    )
    for row in result["rows"]:
        about = (str(row["tokens"]), " ".join(filter(None, (row[key] for key in ("what", "payload", "variant")))))
        if "why" in row:
            table.add_row(*about, *["-"] * 9)
            continue
        times = [f"{row['us'][name]['p50']:.1f}" for name in ("native", "compat")]
        host = [""] * 5
        if row["host_more_us"] is not None:
            differences = (row.get(key) for key in ("host_more_us", "host_p99_more_us", "host_p99_again_us"))
            more = ["" if us is None else f"{us:+.1f}" for us in differences]
            host = [*(f"{row['host_us'][name]:.1f}" for name in ("native", "compat")), *more]
        table.add_row(*about, *times, f"x{row['of_native']:.3f}", *host, window_mib(row))
    show_table(table, out)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['tokens']} tokens, {row['what']}: {row['why']}", style="dim", markup=False)


def window_mib(row: dict[str, Any]) -> str:
    """Format the window of a rank, as it was open in the run if the row says it; empty if the row lacks it."""
    nbytes = row.get("opened_bytes", row.get("window_bytes"))
    return "" if nbytes is None else f"{nbytes / 2**20:.0f}"


def show_rows(rows: list[dict[str, Any]], out: Console) -> None:
    """Print rows that have no table of their own, with a column for each key but those of nested values."""
    nested = {key for row in rows for key, of in row.items() if isinstance(of, dict) and dict in map(type, of.values())}
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in nested]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column, justify="right" if figures else "left", no_wrap=figures)
    for row in rows:
        table.add_row(*(escape(str(row.get(column, ""))) for column in columns))
    show_table(table, out)
