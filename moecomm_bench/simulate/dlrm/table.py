"""Tables of `moecomm simulate dlrm` for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moecomm.tools.fitted import show_table
from moecomm_bench.simulate.dlrm.iteration import FUSED, TORCH, UNFUSED

_SHOWN = (TORCH, UNFUSED, FUSED)
ITERATION = "iteration"
_ERRORS = ("error", "held_out_error")


def phases(row: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return each phase of a row with its microseconds by form, in order, and the iteration last."""
    found: dict[str, dict[str, float]] = {}
    for form in _SHOWN:
        for phase in row["forms"][form]["phases"]:
            found.setdefault(phase["name"], {})[form] = phase["us"]
    order = [p["name"] for p in row["forms"][UNFUSED]["phases"]]
    joint = [name for name in found if name not in order]
    listed = [*order[:2], *joint, *order[2:]]  # lookups and their all-to-all first
    return [(name, found[name]) for name in listed] + [(ITERATION, {f: row["forms"][f]["us"] for f in _SHOWN})]


def show_dlrm(result: dict[str, Any], out: Console) -> None:
    """Print a prediction: the phases at the last number of domains, and the savings at each."""
    case, nic, rows = result["case"], result["inputs"]["nic"], result["rows"]
    out.print(
        f"[bold]Predicted[/], not measured.  {case['tables']} tables x {case['columns']} {case['dtype']}, "
        f"{case['pooling']} lookups a bag, {case['samples']} samples a rank; MLPs {_widths(case['bottom'])}, "
        f"{_widths(case['top'])}\n"
        f"GPUs as {result['inputs']['gpu']['name']} was measured; a NIC a GPU: {nic['gbs']:g} GB/s, of which "
        f"{nic['efficiency']:.0%} is reached, {nic['latency_us']:g} us\n"
        "torch: a call of embedding_bag a table, then NCCL; unfused: the fused kernel's lookups, then NCCL",
        highlight=False,
    )
    last = rows[-1]
    table = _table(f"{last['domains']} x {last['ranks']} GPUs", *(f"{form} us" for form in _SHOWN))
    for name, us in phases(last):
        style = "bold" if name == ITERATION else ""
        table.add_row(name, *(f"{us[form]:.1f}" if form in us else "" for form in _SHOWN), style=style)
    show_table(table, out, names=1)
    out.print("Phases on the GPU and on the network overlap: the iteration is shorter than their sum.\n", style="dim")
    table = _table("domains", "GPUs", *(f"{form} us" for form in _SHOWN), "saving", "over torch")
    for row in rows:
        times = (f"{row['forms'][form]['us']:.1f}" for form in _SHOWN)
        savings = (f"{row[name]:.1%}" for name in ("saving", "saving_over_torch"))
        table.add_row(f"{row['domains']} x {row['ranks']}", str(row["gpus"]), *times, *savings)
    show_table(table, out, names=1)


def show_rows(fitted: dict[str, Any], out: Console) -> None:
    """Print each measured row beside the fit."""
    table = _table("terms", "case", "dtype", "measured us", "fitted us", "error", "held out")
    for row in fitted["rows"]:
        times = (f"{row[name]:.1f}" for name in ("measured_us", "fitted_us"))
        errors = (f"{row[name]:+.1%}" for name in _ERRORS)
        table.add_row(row["terms"], row["case"], row["dtype"], *times, *errors)
    show_table(table, out, names=3)
    for one in fitted["errors"]:
        error, held_out = (f"{one[name]['median']:.1%}, worst {one[name]['worst']:.1%}" for name in _ERRORS)
        told = f"{one['terms']}: {one['rows']} rows, median error {error}; held out {held_out}"
        out.print(told, highlight=False)


def _widths(widths: list[int]) -> str:
    return "-".join(map(str, widths))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = column.endswith((" us", "error", "held out", "saving", "torch")) or column == "GPUs"
        table.add_column(column, no_wrap=figures, justify="right" if figures else "left")
    return table
