"""The command `moecomm trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moecomm.bench.options import written

app = typer.Typer(
    help="Traces that MOECOMM_TRACE_DIR or moecomm.trace has written.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def traces() -> None:
    """Traces that MOECOMM_TRACE_DIR or moecomm.trace has written."""


@app.command("merge")
def merge_files(
    folder: Annotated[Path, typer.Argument(help="The folder with the files of all ranks.")],
    out: Annotated[Path, typer.Option("--out", "-o", callback=written, help="The file, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
) -> None:
    """Merge the files of all ranks into one Chrome trace, with aligned clocks."""
    from moecomm.tracing import reading
    from moecomm.tracing.merge import merge

    files = reading.read(folder)
    merged = merge(files)
    with out.open("w") as file:
        json.dump(merged, file)
    spans = sum(len(rank.spans) for rank in files)
    typer.echo(f"{out}: {spans} spans of {len(files)} files")
    for clock in merged["otherData"]["clocks"]:
        if not clock["aligned"]:
            typer.echo(f"{clock['host']}: its clock can't be aligned with that of {files[0].host}", err=True)
        elif clock["error_ns"]:
            typer.echo(f"{clock['host']}: aligned to within {clock['error_ns'] / 1000:.1f} us")
    if dropped := sum(merged["otherData"]["dropped"].values()):
        typer.echo(f"{dropped} spans had no room and are missing", err=True)
