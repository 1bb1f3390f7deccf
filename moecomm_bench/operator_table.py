"""The table of `moecomm bench overlap`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moecomm.tools.fitted import new_table, show_table


def show(result: dict[str, Any], out: Console) -> None:
    """Print it."""
    out.print(
        f"fused operators, {result['ranks']} ranks, {result['backend']}, graph; median of {result['replays']}, slowest "
        "rank; speedup: of ours over this; of alone: time beside the product without communication",
        highlight=False,
    )
    table = new_table(("operator", "case", "dtype", "by"), ("p50", "p90 us", "TFLOP/s", "speedup", "of alone"))
    for row in result["rows"]:
        form = f": {row['form']}" if row.get("form") else ""
        about = (row["operator"], row["case"], row["dtype"], row["who"] + form)
        table.add_row(*about, *(["-"] * 5 if "why" in row else _figures(row)))
    show_table(table, out, names=4)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['operator']} {row['case']}, {row['who']}: {row['why']}", style="dim", markup=False)


def _figures(row: dict[str, Any]) -> list[str]:
    return [
        *(f"{row['us'][part]:.1f}" for part in ("p50", "p90")),
        "" if row["tflops"] is None else f"{row['tflops']:.0f}",
        *("" if row[field] is None else f"x{row[field]:.2f}" for field in ("speedup", "of_alone")),
    ]
