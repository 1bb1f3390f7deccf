"""The commands `moecomm bench plot` and `show`, which read results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moecomm.tools.options import written

Results = Annotated[list[Path], typer.Argument(help="JSON of a benchmark.")]


def plot(
    results: Results,
    out: Annotated[Path, typer.Option(callback=written, help="A .png, .svg or .pdf.")] = Path("moecomm.png"),
) -> None:
    """Plot JSON of dispatch-combine, sweep, moe, gemm, overlap, latency, all-to-all, backends or simulate.

    Needs the extra bench. Several backends and predictions are also drawn over the number of domains.
    """
    from rich.console import Console

    from moecomm_bench.plot import draw

    draw(results, out)
    Console().print(str(out), highlight=False)


def show(results: Results) -> None:
    """Print the full tables of results, from JSON of any benchmark."""
    from moecomm_bench import show

    show.show(results)


def add_results(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(plot)
    app.command()(show)
