"""The full table of a result of any benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from moecomm_bench import gather_table, operator_table, schema, steps_table, table
from moecomm_bench.simulate.table import show_check, show_predictions

_TABLES: dict[str, Callable[[dict[str, Any], Console], None]] = {
    "dispatch-combine": table.show_dispatch_combine,
    "backends": table.show_backends,
    "latency": table.show_latency,
    "latency-backends": table.show_latency_backends,
    "all-to-all": table.show_all_to_all,
    "gemm": table.show_gemm,
    "moe": table.show_moe,
    "overlap": operator_table.show,
    "all-gather-study": gather_table.show,
    "decode": steps_table.show_decode,
    "training": steps_table.show_training,
    "deep-ep-layer": table.show_deep_ep_layer,
    "simulate": show_predictions,
    "simulate-check": show_check,
}


def show(paths: Iterable[Path]) -> None:
    """Print the origin of each result, and its table. Raises BadInput for a file that is no result."""
    out = table.console()
    for path in paths:
        _show(path, out)


def _show(path: Path, out: Console) -> None:
    result = schema.read(path)
    about = f"{result['what']}: {result['date']}, commit {result['commit'] or 'unknown'}; {result['command']}"
    out.print(about, style="bold", highlight=False, markup=False, soft_wrap=True)
    if "how" in result:
        out.print(result["how"], highlight=False, markup=False)
    if shown := _TABLES.get(result.get("benchmark", "")):
        shown(result, out)
    else:
        medians = [{"by": by, **of} for by, of in result.get("medians", {}).items()]
        table.show_rows(result.get("rows") or medians, out)
