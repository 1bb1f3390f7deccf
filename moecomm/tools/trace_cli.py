"""The command `moecomm trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moecomm.tools.options import written

app = typer.Typer(
    help="Traces that MOECOMM_TRACE_DIR or moecomm.trace has written.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Files of spans of all ranks, or folders with them.")
]


@app.callback()
def traces() -> None:
    """Traces that MOECOMM_TRACE_DIR or moecomm.trace has written."""


@app.command("merge")
def merge_files(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", callback=written, help="The file, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
) -> None:
    """Merge the files of all ranks into one Chrome trace, with aligned clocks."""
    from moecomm.observe.tracing import reading
    from moecomm.observe.tracing.merge import merge

    found = reading.read(files)
    merged = merge(found)
    with out.open("w") as file:
        json.dump(merged, file)
    spans = sum(len(rank.spans) for rank in found)
    typer.echo(f"{out}: {spans} spans of {len(found)} files")
    for clock in merged["otherData"]["clocks"]:
        if not clock["aligned"]:
            typer.echo(f"{clock['host']}: its clock can't be aligned with that of {found[0].host}", err=True)
        elif clock["error_ns"]:
            typer.echo(f"{clock['host']}: aligned to within {clock['error_ns'] / 1000:.1f} us")
    if dropped := sum(merged["otherData"]["dropped"].values()):
        typer.echo(f"{dropped} spans had no room and are missing", err=True)
