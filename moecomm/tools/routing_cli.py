"""The commands `moecomm record` and `moecomm routing`."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moecomm.errors import BadInput
from moecomm.routing.load import RANKS, loads
from moecomm.routing.recorded import Recorded
from moecomm.routing.recorded import join as joined
from moecomm.routing.recorder import RoutingRecorder
from moecomm.routing.synthetic import MOST_TOKENS, MOST_ZIPF
from moecomm.routing.synthetic import synthesize as drawn
from moecomm.tools.fitted import show_table
from moecomm.tools.options import real, whole, written

app = typer.Typer(
    help="Show, join and synthesize files of recorded routing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MOST_LISTED = 64  # layers of a table
_WHOLE = 1 << 62

File = Annotated[Path, typer.Argument(help="A file of moecomm record.")]
Out = Annotated[Path, typer.Argument(callback=written, help="The file to write.")]


def record(
    program: Annotated[str, typer.Argument(help="A Python file, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the program.")] = None,
    out: Annotated[
        Path, typer.Option(callback=written, help="The file; with several ranks, -rank0 and so on before its suffix.")
    ] = Path("moecomm.routing"),
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module.")] = False,
    model: Annotated[str, typer.Option(help="Name of the model, for the header.")] = "",
    layers: Annotated[
        int, typer.Option(callback=whole(1, 1 << 16), help="Dispatches of a Buffer in one pass through the model.")
    ] = 1,
    weights: Annotated[bool, typer.Option("--weights", help="Also record the routing weights.")] = False,
    max_tokens: Annotated[
        int, typer.Option(callback=whole(1, _WHOLE), help="Tokens of a rank after which recording ends.")
    ] = 1 << 24,
) -> None:
    """Run a Python program, and record the routing of all its Buffers: one file per rank; also under torchrun.

    Options of the command come before PROGRAM, those of the program behind it.
    """
    recorder = RoutingRecorder(out, model=model, layers=layers, weights=weights, max_tokens=max_tokens)
    before = sys.argv, sys.path[0]
    sys.argv = [program, *(arguments or [])]
    sys.path[0] = str(Path.cwd() if module else Path(program).absolute().parent)
    try:
        if not _exists(program, module):
            raise BadInput("program", repr(program), "a module that can be found" if module else "a file that exists")
        with recorder:
            if module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before
        for file in recorder.files:
            Console(stderr=True).print(f"routing: {file}", highlight=False, markup=False, soft_wrap=True)


def _exists(program: str, module: bool) -> bool:
    if not module:
        return Path(program).exists()
    try:
        return importlib.util.find_spec(program) is not None
    except (ImportError, ValueError):  # of the package that it is in; of an empty name
        return False


@app.command()
def show(file: File) -> None:
    """Print the tokens of a file, and how evenly they load experts and ranks."""
    _show(Recorded.load(file), Console())


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(help="Files of moecomm record, of several ranks or runs.")],
    out: Annotated[Path, typer.Option(callback=written, help="The file to write.")],
    layer: Annotated[str | None, typer.Option(help="Keep only this layer.")] = None,
) -> None:
    """Join files of the same model to one; for a benchmark of one layer, keep only that."""
    _show(Recorded.load(joined([Recorded.load(file) for file in files], layer).save(out)), Console())


@app.command()
def synthesize(
    file: Out,
    model: Annotated[
        str, typer.Option(help="Model that sets experts and topk (a name in moecomm.router.MODELS).")
    ] = "deepseek-v3",
    tokens: Annotated[int, typer.Option(callback=whole(1, MOST_TOKENS), help="Number of tokens.")] = 65536,
    zipf: Annotated[
        float, typer.Option(callback=real(0, MOST_ZIPF), help="Exponent of the experts' popularity; 0: even.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(callback=whole(0), help="Seed of the draw.")] = 0,
) -> None:
    """Write a routing whose experts are as popular as Zipf's law says, marked "synthetic"."""
    _show(Recorded.load(drawn(model, tokens, zipf=zipf, seed=seed).save(file)), Console())


def _show(found: Recorded, out: Console) -> None:
    notes = "".join(f", {name} {text}" for name, text in found.notes.items())
    out.print(
        f"{found.model or 'model unknown'}: top-{found.topk} of {found.experts} experts; {found.tokens} tokens, "
        f"calls: {len(found.records)}, layers: {len(found.layers)}; {found.source}, rank {found.rank} of {found.ranks}"
        f"{'' if found.topk_weights is None else ', with weights'}{notes}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    table = Table("layer", box=None, pad_edge=False, header_style="dim")
    ranks = [count for count in RANKS if count <= found.experts]
    for column in ("calls", "tokens", "rows", "busiest expert", *(f"of {count} ranks" for count in ranks), "entropy"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = loads(found)
    for load in rows[:MOST_LISTED]:
        table.add_row(
            escape(load.layer) or "all",
            *(str(count) for count in (load.calls, load.tokens, load.rows)),
            f"x{load.busiest_expert:.2f}",
            *(f"x{load.busiest_rank[count]:.2f}" for count in ranks),
            f"{load.entropy:.2f} bits",
        )
    show_table(table, out)
    if len(rows) > MOST_LISTED:
        out.print(f"and {len(rows) - MOST_LISTED} more layers", style="dim")
    out.print("Busiest expert and rank: over all tokens of a layer, as a multiple of even load.", style="dim")


def add_routing(commands: typer.Typer) -> None:
    """Add the commands to those of moecomm."""
    commands.add_typer(app, name="routing")
    # Pass all words after PROGRAM to the program, options too.
    commands.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(record)
