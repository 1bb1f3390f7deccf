"""Tables of the model's results for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moecomm.tools.fitted import show_table
from moecomm_bench.simulate import direct
from moecomm_bench.simulate.domain import TERMS

_ERRORS = ("rows", "median error", "worst")


def show_predictions(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate`."""
    case, inputs, nic = result["case"], result["inputs"], result["inputs"]["nic"]
    name = f"[bold]{case['model']}[/]: " if case["model"] else ""
    blocks = f"{inputs['num_sms']} blocks" if inputs["num_sms"] else "blocks by the table"
    out.print(
        f"[bold]Predicted[/], not measured.  {name}hidden {case['hidden']}; {case['layout']}, {case['payload']} "
        f"dispatch; {blocks}\n"
        f"routing: {inputs['routing']}\n"
        f"domains as {inputs['domain']} was measured; a NIC a GPU: {nic['gbs']:g} GB/s, of which rows reach "
        f"{nic['efficiency']:.0%}, {nic['latency_us']:g} us, {nic['mega_messages']:g} million messages a second",
        highlight=False,
    )
    table = _table(
        "domains", "GPUs", "tokens", "ranks wanted", "dispatch us", "", "", "SMs", "combine us", "", "", "SMs"
    )
    with_memory = any("memory" in row for row in result["rows"])
    for column in ("GEMMs us", "layer us", "overlapped us", *["weights GiB", "window GiB"] * with_memory):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        rounds = [
            (f"{row[w]['us']:.1f}", row[w]["algorithm"], row[w]["bound"], str(row[w]["blocks"]))
            for w in ("dispatch", "combine")
        ]
        layer = [f"{row['layer'][part]:.1f}" for part in ("gemm_us", "serial_us", "overlapped_us")]
        where = f"{row['domains']} x {row['ranks']}", str(row["gpus"]), str(row["tokens"])
        gib = [row["memory"][part] for part in ("weights_gib", "window_gib")] if with_memory else []
        memory = ["" if part is None else f"{part:.2f}" for part in gib]
        table.add_row(*where, f"{row['ranks_wanted']:.2f}", *rounds[0], *rounds[1], *layer, *memory)
    show_table(table, out, names=3)


def show_check(result: dict[str, Any], out: Console) -> None:
    """Print the tables of `moecomm simulate check`."""
    table = _table("measured in", "operation", "tokens", "measured us", "predicted us", "error", "held out error", "")
    for row in result["measured"]:
        what = " ".join(filter(None, (row["layout"], row["what"], row["payload"], row["variant"])))
        where = row["file"] if row["domains"] == 1 else f"{row['file']} ({row['domains']} domains)"
        held_out = f"{row['held_out_error']:+.1%}" if "held_out_error" in row else ""
        kind = "excluded" if "excluded" in row else row["kind"].partition(": ")[2]
        table.add_row(where, what, str(row["tokens"]), *_compared(row), held_out, kind)
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
    table = _table("kind", "rows", "median error", "signed error", "worst")
    for error in result["errors"]:
        figures = f"{error['median']:.1%}", f"{error['signed']:+.1%}", f"{error['worst']:+.1%}"
        table.add_row(error["kind"], str(error["rows"]), *figures)
    show_table(table, out)


def show_fit(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate fit`."""
    figures = ("floor us", "alpha us", "GB/s", "row ns", "block GB/s", "copy GB/s")
    table = _table("operation", "tokens", *figures, *_ERRORS)
    for line in result["lines"]:
        what = " ".join(filter(None, (line["layout"], line["what"], line["variant"])))
        terms = (f"{line[part]:.1f}" for part in TERMS)
        table.add_row(
            what,
            line["regime"],
            *terms,
            str(line["rows"]),
            f"{line['median_error']:.1%}",
            f"{line['worst_error']:.1%}",
        )
    show_table(table, out, names=2)
    table = _table("few tokens between domains", "start us", "row ns", "block GB/s", "copy GB/s", "overlap", *_ERRORS)
    for line in result["direct"]:
        what = " ".join(filter(None, (line["layout"], line["what"], line["variant"])))
        terms = (f"{line[part]:.2f}" if part == "overlap" else f"{line[part]:.1f}" for part in direct.TERMS)
        table.add_row(what, *terms, str(line["rows"]), f"{line['median_error']:.1%}", f"{line['worst_error']:.1%}")
    show_table(table, out)
    nic = result["nic"]
    out.print(f"rows reach {nic['efficiency']:.1%} of the line rate of a NIC, by published times", highlight=False)


def _compared(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['measured_us']:.1f}", f"{row['predicted_us']:.1f}", f"{row['error']:+.1%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = column.endswith(("us", "error", "rows", "worst", "GB/s", "ns", "GPUs", "wanted", "SMs"))
        figures = figures or column == "tokens"
        # In a table that is too wide, words may wrap to a second line, but figures must not be cut.
        table.add_column(column, no_wrap=figures, justify="right" if figures else "left")
    return table
