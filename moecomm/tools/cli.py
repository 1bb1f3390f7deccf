"""The command `moecomm`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moecomm import __version__
from moecomm.tools.fitted import show_table
from moecomm.tools.options import whole
from moecomm.tools.routing_cli import add_routing
from moecomm.tools.trace_cli import app as trace

if TYPE_CHECKING:
    from moecomm.tools.demo import Result
    from moecomm.tools.doctor import Report

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Dispatch and combine for mixture-of-experts layers."""
    if version:
        typer.echo(f"moecomm {__version__}")
        raise typer.Exit


app.add_typer(trace, name="trace")
add_routing(app)
# Commands of moecomm_bench, by name alone: that package imports moecomm, never the other way around.
for name, module in (("bench", "cli"), ("simulate", "simulate.cli"), ("tune", "tune.cli")):
    app.add_typer(import_module(f"moecomm_bench.{module}").app, name=name)


@app.command()
def demo(
    ranks: Annotated[int | None, typer.Option(help="Number of processes; default: 4 on CPUs, one per GPU.")] = None,
    tokens: Annotated[int, typer.Option(callback=whole(1), help="Tokens of each rank.")] = 512,
    model: Annotated[
        str, typer.Option(help="Model that sets routing and hidden size (a name in moecomm.router.MODELS).")
    ] = "deepseek-v3",
    intermediate: Annotated[
        int, typer.Option(callback=whole(1), help="Columns of an expert; the model's own would not fit a laptop.")
    ] = 64,
    backend: Annotated[str, typer.Option(help="auto, host, lsa, gin or nvshmem.")] = "auto",
) -> None:
    """Run an MoE layer over several ranks, in every layout, and check it against a single rank."""
    from moecomm.tools.demo import demo as run

    result = run(model=model, ranks=ranks, tokens=tokens, intermediate=intermediate, backend=backend)
    show_demo(result, Console())
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show which backends can run here, and the first thing missing for each of the rest."""
    from moecomm.tools.doctor import doctor as examine

    report = examine()
    if json:
        typer.echo(report.json())
    else:
        show_doctor(report, Console())


@app.command()
def explain(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Flight records of the ranks of a job, or folders with them."),
    ],
) -> None:
    """Name the rank that went astray first, from the flight records that the ranks of a job have written."""
    from moecomm.observe.flight import reading
    from moecomm.observe.flight.explain import explain as compare

    for report in compare(reading.read(files)):
        typer.echo("\n".join(report.lines()))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM [ARGUMENT]...", help="A Python file, and its arguments.")
    ],
    ranks: Annotated[int, typer.Option(callback=whole(1), help="Number of processes.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is a module, as with python -m.")] = False,
) -> None:
    """Start a program on several ranks of this machine, as torchrun does, but leave the others alone if one is lost.

    It ends when all ranks have ended. Exit code 0: at least one rank has ended with 0, and all others with 0 or by a
    signal. Otherwise the first exit code that is not 0, or 128 + the signal.
    """
    from moecomm.tools.launch import run_program

    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(f"moecomm launch: {line}", highlight=False, markup=False, soft_wrap=True)

    raise typer.Exit(run_program(["-m", *program] if module else program, ranks, say))


@app.command()
def top(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that MOECOMM_TOP_DIR names on every rank of the job.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
) -> None:
    """Show what every rank of a running job does: rates, waits, and which rank, link or expert stands out.

    It ends with the job, or on Ctrl-C.
    """
    from moecomm.observe.stats import top as view

    if once:
        Console().print(view.frame(view.read(folder)))
        return
    view.watch(folder, Console())


def show_demo(result: Result, console: Console) -> None:
    """Print the result of the demo as a table."""
    from moecomm.router import MODELS

    case, shape = result.case, MODELS[result.case.model]
    console.print(
        f"[bold]{case.model}[/] routing: hidden {shape.hidden}, top-{shape.topk} of {shape.num_experts} experts, "
        f"{shape.gate} gate\n"
        f"{case.ranks} ranks x {case.tokens} tokens, bfloat16; experts of {case.intermediate} columns\n"
        f"backend [bold]{result.backend}[/]: {result.why}\n",
        highlight=False,
    )
    table = Table("layout", box=None, pad_edge=False, header_style="dim")
    for column in ("rows", "MB out", "MB back", "dispatch", "combine", "largest error", "of bound"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.layouts:
        table.add_row(
            row.layout,
            f"{row.rows}",
            f"{row.dispatched_bytes / 1e6:.1f}",
            f"{row.combined_bytes / 1e6:.1f}",
            f"{row.dispatch_s * 1e3:.2f} ms",
            f"{row.combine_s * 1e3:.2f} ms",
            f"{row.error:.2g}",
            f"[{'green' if row.of_bound <= 1 else 'red'}]{row.of_bound:.0%}[/]",
        )
    show_table(table, console)
    console.print(
        "MB: rows between ranks, all ranks together.  Times: median, slowest rank.\n", style="dim", highlight=False
    )
    if result.ok:
        console.print("[green]Every output equals the single-rank layer[/] to within the rounding of bfloat16.")
    else:
        console.print("[red]An output differs from the single-rank layer by more than rounding explains.[/]")


def show_doctor(report: Report, console: Console) -> None:
    """Print the report of the doctor."""
    for backend in report.backends:
        can = ("can run", "green") if backend.can_run else ("can't run", "red")
        console.print(Text.assemble(f"{backend.name:<8} ", can, backend.verdict), soft_wrap=True)
    console.print()
    console.print(report.details(), highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run the command `moecomm`."""
    run(app)


def run(commands: typer.Typer) -> None:
    """Run the command that the command line names.

    An error of moecomm is printed as its message, without a traceback. Exit codes: 2 for BadInput, 1 for the other
    errors.
    """
    from moecomm.errors import BadInput, MoecommError

    try:
        commands()
    except MoecommError as error:
        console = Console(stderr=True)
        console.print(f"[red]{type(error).__name__}[/]:", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, BadInput) else 1)
