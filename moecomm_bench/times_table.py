"""The table of one operation's times: alone, in a row, and eager."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moecomm.tools.fitted import new_table, show_table

_PARTS = ("p50", "p90", "p99")


def show_times(result: dict[str, Any], out: Console) -> None:
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
