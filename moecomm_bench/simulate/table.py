"""Tables of the model's results for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moecomm_bench.columns import Column, joined, show_rows
from moecomm_bench.simulate import direct
from moecomm_bench.simulate.domain import TERMS

_TOKENS = Column("tokens", "tokens")


def _round(what: str) -> tuple[Column, ...]:
    algorithm, bound = Column("", f"{what}.algorithm"), Column("", f"{what}.bound")
    return Column(f"{what} us", f"{what}.us", "{:.1f}"), algorithm, bound, Column("SMs", f"{what}.blocks")


def _domains(row: dict[str, Any]) -> str:
    return f"{row['domains']} x {row['ranks']}"


_PLACE = (Column("domains", _domains), Column("GPUs", "gpus"), _TOKENS)
_PREDICTED = (
    Column("ranks wanted", "ranks_wanted", "{:.2f}"),
    *(*_round("dispatch"), *_round("combine")),
    *(Column("GEMMs us", "layer.gemm_us", "{:.1f}"), Column("layer us", "layer.serial_us", "{:.1f}")),
    Column("overlapped us", "layer.overlapped_us", "{:.1f}"),
    *(Column(f"{part} GiB", f"memory.{part}_gib", "{:.2f}") for part in ("weights", "window")),
)
_COMPARED = (
    *(Column("measured us", "measured_us", "{:.1f}"), Column("predicted us", "predicted_us", "{:.1f}")),
    Column("error", "error", "{:+.1%}"),
)
_MEASURED = (
    Column("measured in", lambda row: row["file"] + (f" ({row['domains']} domains)" if row["domains"] > 1 else "")),
    *(Column("operation", joined("layout", "what", "payload", "variant")), _TOKENS),
)
_HELD_OUT = (
    Column("held out error", "held_out_error", "{:+.1%}"),
    Column("", lambda row: "excluded" if "excluded" in row else row["kind"].partition(": ")[2]),
)
_PUBLISHED = (
    Column("published", lambda row: row["kind"].partition(": ")[2]),
    *(Column("operation", joined("what", "payload")), Column("domains", _domains)),
)
_ERRORS = (
    *(Column("rows", "rows"), Column("median error", "median", "{:.1%}"), Column("signed error", "signed", "{:+.1%}")),
    Column("worst", "worst", "{:+.1%}"),
)
_LINE = (Column("operation", joined("layout", "what", "variant")), Column("tokens", "regime"))
_UNITS = {"us": "us", "ns": "ns", "gbs": "GB/s"}
_FITTED = (
    Column("rows", "rows"),
    *(Column("median error", "median_error", "{:.1%}"), Column("worst", "worst_error", "{:.1%}")),
)


def show_predictions(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate`."""
    case, inputs, nic = result["case"], result["inputs"], result["inputs"]["nic"]
    name = f"{case['model']}: " if case["model"] else ""
    blocks = f"{inputs['num_sms']} blocks" if inputs["num_sms"] else "blocks by the table"
    about = (
        f"hidden {case['hidden']}; {case['layout']}, {case['payload']} dispatch; {blocks}\n"
        f"routing: {inputs['routing']}\n"
        f"domains as {inputs['domain']} was measured; a NIC a GPU: {nic['gbs']:g} GB/s, of which rows reach "
        f"{nic['efficiency']:.0%}, {nic['latency_us']:g} us, {nic['mega_messages']:g} million messages a second"
    )
    out.print(f"Predicted, not measured.  {name}{about}", highlight=False, markup=False)
    show_rows(result["rows"], _PLACE, _PREDICTED, out)


def show_check(result: dict[str, Any], out: Console) -> None:
    """Print the tables of `moecomm simulate check`."""
    if result["measured"]:
        show_rows(result["measured"], _MEASURED, (*_COMPARED, *_HELD_OUT), out)
    else:
        out.print("No measured rows: name JSON of moecomm bench, or have it in bench/results.")
    if result["left_out"]:
        left_out = f"{result['left_out']} rows of operations that nothing was fitted to are left out"
        out.print(left_out, style="dim", markup=False)
    show_rows(result["published"], _PUBLISHED, (*_COMPARED, Column("bound by", "bound")), out)
    for source in dict.fromkeys((row["source"], row["note"]) for row in result["published"]):
        out.print("; ".join(filter(None, source)), style="dim", markup=False, highlight=False)
    show_rows(result["errors"], (Column("kind", "kind"),), _ERRORS, out)


def show_fit(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm simulate fit`."""
    show_rows(result["lines"], _LINE, (*map(_term, TERMS), *_FITTED), out)
    few = Column("few tokens between domains", joined("layout", "what", "variant"))
    show_rows(result["direct"], (few,), (*map(_term, direct.TERMS), *_FITTED), out)
    nic = result["nic"]
    out.print(f"rows reach {nic['efficiency']:.1%} of the line rate of a NIC, by published times", highlight=False)


def _term(name: str) -> Column:
    """Return the column of a fitted term, with its unit if it has one."""
    word, _, unit = name.rpartition("_")
    shown = _UNITS.get(unit or name)
    return Column(f"{word} {shown}".strip(), name, "{:.1f}") if shown else Column(name, name, "{:.2f}")
