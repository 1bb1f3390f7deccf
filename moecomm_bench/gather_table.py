"""The table of `moecomm bench all-gather-study`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moecomm.tools.fitted import new_table, show_table


def show(result: dict[str, Any], out: Console) -> None:
    """Print it."""
    size = result["size"]
    out.print(
        f"all-gather and matmul, {size} x {size} x {size}, {result['dtype']}, {result['ranks']} ranks, "
        f"{result['backend']}, graph; median of {result['replays']}, slowest rank; source: NVIDIA/Fuser pull request "
        "6002, 8 H100s; of 1: TFLOP/s over those of variant 1",
        highlight=False,
    )
    table = new_table(("", "variant", "class"), ("ms", "TFLOP/s", "of 1", "source ms", "TFLOP/s", "of 1"))
    for row in result["rows"]:
        ours = {**row, "ms": row["us"]["p50"] / 1e3} if "us" in row else None
        about = (str(row["variant"]), row["name"], row["kind"])
        table.add_row(*about, *cells(ours), *cells(row["source"]))
    show_table(table, out, names=3)
    for row in result["rows"]:
        if "why" in row:
            out.print(f"{row['variant']}, {row['name']}: {row['why']}", style="dim", markup=False)


def cells(figures: dict[str, Any] | None) -> list[str]:
    """Return ms, TFLOP/s and the ratio to variant 1 as text; dashes if there are none."""
    if figures is None:
        return ["-"] * 3
    ratio = figures["of_first"]
    tflops = figures["tflops"]
    digits = 2 if tflops < 10 else 1
    return [f"{figures['ms']:.3f}", f"{tflops:.{digits}f}", "-" if ratio is None else f"x{ratio:.2f}"]
