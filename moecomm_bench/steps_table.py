"""Tables of decode and training steps for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moecomm.tools.fitted import new_table, show_table
from moecomm_bench import replay
from moecomm_bench.table import console, window_mib

__all__ = ["console", "show_decode", "show_training"]


def show_decode(result: dict[str, Any], out: Console) -> None:
    """Print the table of decode."""
    out.print(
        f"{_sizes(result)}; {result['layers']} layers a step, {result['alone']['calls']} steps, ranks start together; "
        f"stand-in: {result['expert_us']:g} us; out of step: ranks come 0 to {result['delay_us']:g} us late to each "
        f"layer, {result['waits_us']:.0f} us a step in all{escape(replay.said(result['case']))}",
        highlight=False,
    )
    table = new_table(
        ("tokens", "layout", "payload", "experts", "ranks"),
        ("step p50", "p90", "p99 us", "layer us", "of it beside experts and waits", "window MiB"),
    )
    for row in result["rows"]:
        about = (str(row["tokens"]), row["layout"], row["payload"], row["experts"])
        ranks = "out of step" if row["delays"] else "in step"
        if "why" in row:
            table.add_row(*about, ranks, *["-"] * 6)
            continue
        beside = f"{row['beside_us']:.1f}" if "beside_us" in row else ""
        times = (f"{row['us'][part]:.0f}" for part in ("p50", "p90", "p99"))
        table.add_row(*about, ranks, *times, f"{row['layer_us']:.1f}", beside, window_mib(row))
    _finish(result, table, out, 5)


def show_training(result: dict[str, Any], out: Console) -> None:
    """Print the table of training."""
    out.print(
        f"{_sizes(result)}; {result['layers']} layers a step with {result['intermediate']} columns inside an expert, "
        f"eager; median of {result['case']['replays']}, slowest rank; of torch: as many times as fast"
        f"{escape(replay.said(result['case']))}",
        highlight=False,
    )
    table = new_table(("tokens", "by", "what"), ("step p50", "p90 us", "layer us", "TFLOP/s", "of torch", "window MiB"))
    for row in result["rows"]:
        about = (str(row["tokens"]), row["who"], row["what"])
        if "why" in row:
            table.add_row(*about, *["-"] * 6)
            continue
        times = (f"{row['us'][part]:.0f}" for part in ("p50", "p90"))
        of_torch = f"x{row['of_torch']:.2f}" if "of_torch" in row else ""
        table.add_row(*about, *times, f"{row['layer_us']:.0f}", f"{row['tflops']:.0f}", of_torch, window_mib(row))
    _finish(result, table, out, 3)


def _sizes(result: dict[str, Any]) -> str:
    case = result["case"]
    name = f"[bold]{case['model']}[/]: " if case["model"] else ""
    return (
        f"{name}hidden {case['hidden']}, top-{case['topk']} of {case['experts']} experts; {case['ranks']} ranks, "
        f"{result['backend']}"
    )


def _finish(result: dict[str, Any], table: Table, out: Console, names: int) -> None:
    show_table(table, out, names=names)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['tokens']} tokens: {row['why']}", style="dim", markup=False)
