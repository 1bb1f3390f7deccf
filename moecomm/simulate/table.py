"""Tables of the model's results for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moecomm.bench.fitted import show_table


def show_predictions(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate`."""
    case, inputs, nic = result["case"], result["inputs"], result["inputs"]["nic"]
    gate = case["gate"]
    name = f"[bold]{case['model']}[/]: " if case["model"] else ""
    grouped = f", {gate['topk_groups']} of {gate['groups']} groups" if gate["groups"] > 1 else ""
    skewed = f"; {case['skew']:.0%} of the tokens want rank 0" if case["skew"] else ""
    out.print(
        f"[bold]Predicted[/], not measured.  {name}hidden {case['hidden']}, top-{gate['topk']} of {gate['experts']} "
        f"experts{grouped}; {case['layout']}, {case['payload']} dispatch{skewed}\n"
        f"domains as {inputs['domain']} was measured; a NIC a GPU: {nic['gbs']:g} GB/s, {nic['latency_us']:g} us, "
        f"{nic['mega_messages']:g} million messages a second",
        highlight=False,
    )
    table = _table("domains", "GPUs", "tokens", "ranks wanted", "dispatch us", "", "", "combine us", "", "")
    for column in ("GEMMs us", "layer us", "overlapped us"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        rounds = [(f"{row[w]['us']:.1f}", row[w]["algorithm"], row[w]["bound"]) for w in ("dispatch", "combine")]
        layer = [f"{row['layer'][part]:.1f}" for part in ("gemm_us", "serial_us", "overlapped_us")]
        where = f"{row['domains']} x {row['ranks']}", str(row["gpus"]), str(row["tokens"])
        table.add_row(*where, f"{row['ranks_wanted']:.2f}", *rounds[0], *rounds[1], *layer)
    show_table(table, out, names=3)


def show_check(result: dict[str, Any], out: Console) -> None:
    """Print the tables of `moecomm simulate check`."""
    table = _table("measured in", "operation", "tokens", "measured us", "predicted us", "error", "")
    for row in result["measured"]:
        what = " ".join(filter(None, (row["layout"], row["what"], row["payload"], row["variant"])))
        where = row["file"] if row["domains"] == 1 else f"{row['file']} ({row['domains']} domains)"
        table.add_row(where, what, str(row["tokens"]), *_compared(row), row["kind"].partition(": ")[2])
    if result["measured"]:
        show_table(table, out, names=3)
    else:
        out.print("No measured rows: name JSON of moecomm bench, or have it in bench/results.")
    if result["left_out"]:
        out.print(f"{result['left_out']} rows of operations that nothing was fitted to are left out", style="dim")
    table = _table("published", "operation", "domains", "as us", "predicted us", "error", "bound by")
    for row in result["published"]:
        what = " ".join(filter(None, (row["what"], row["payload"])))
        name = row["kind"].partition(": ")[2]
        table.add_row(name, what, f"{row['domains']} x {row['ranks']}", *_compared(row), row["bound"])
    show_table(table, out)
    for source in dict.fromkeys((row["source"], row["note"]) for row in result["published"]):
        out.print("; ".join(filter(None, source)), style="dim", markup=False, highlight=False)
    table = _table("kind", "rows", "median error", "worst")
    for error in result["errors"]:
        table.add_row(error["kind"], str(error["rows"]), f"{error['median']:.1%}", f"{error['worst']:+.1%}")
    show_table(table, out)


def show_fit(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate fit`."""
    table = _table("operation", "tokens", "floor us", "alpha us", "GB/s", "row ns", "rows", "median error", "worst", "")
    for line in result["lines"]:
        what = " ".join(filter(None, (line["layout"], line["what"], line["variant"])))
        terms = (f"{line[part]:.1f}" for part in ("floor_us", "alpha_us", "gbs", "row_ns"))
        errors = f"{line['median_error']:.1%}", f"{line['worst_error']:.1%}"
        given = f"not from its rows: {', '.join(line['borrowed'])}" if line["borrowed"] else ""
        table.add_row(what, line["regime"], *terms, str(line["rows"]), *errors, given)
    show_table(table, out, names=2)


def _compared(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['measured_us']:.1f}", f"{row['predicted_us']:.1f}", f"{row['error']:+.1%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = column.endswith(("us", "error", "rows", "worst", "GB/s", "ns", "GPUs", "wanted"))
        figures = figures or column == "tokens"
        # In a table that is too wide, words may wrap to a second line, but figures must not be cut.
        table.add_column(column, no_wrap=figures, justify="right" if figures else "left")
    return table
