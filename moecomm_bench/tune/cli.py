"""The commands `moecomm tune`, `moecomm tune gemms` and `moecomm tune layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moecomm.tools.options import whole, written
from moecomm_bench.options import Model, Models, numbers

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODELS = "deepseek-v3,qwen3-235b,mixtral-8x7b,gpt-oss-120b"
Replays = Annotated[int, typer.Option(callback=whole(1), help="Timed repetitions of each candidate.")]
Ranks = Annotated[int | None, typer.Option(help="Number of processes; default: one per GPU.")]
Backend = Annotated[str, typer.Option(help="auto, host, lsa, gin or nvshmem.")]
Out = Annotated[
    Path | None,
    typer.Option(callback=written, help="File of the table; default: the file that this user's processes read."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=written, help="Write all measured times to this file."),
]


@app.callback()
def rounds(
    context: typer.Context,
    model: Model = "deepseek-v3",
    tokens: Annotated[
        str, typer.Option(help="Sizes to measure; each entry holds up to its size.")
    ] = "4,16,132,512,2048,16384",
    layout: Annotated[str, typer.Option(help="flat, expert, batched.")] = "flat,expert,batched",
    payload: Annotated[str, typer.Option(help="Payload of dispatch: bf16 or fp8.")] = "fp8",
    sms: Annotated[str, typer.Option(help="Numbers of blocks to try.")] = "8,16,24,32,48,64,96,128",
    chunks: Annotated[str, typer.Option(help="Chunk sizes to try, in tokens.")] = "1,2,4,8,16,32",
    replays: Replays = 5,
    ranks: Ranks = None,
    backend: Backend = "auto",
    out: Out = None,
    json: Json = None,
) -> None:
    """Find the block counts and chunk sizes that are fastest here, and store them for rounds on GPUs to use.

    `gemms` and `layers` measure other choices. Entries of an existing table that are not measured again are kept.
    """
    from moecomm.errors import BadInput, Unsupported
    from moecomm_bench.case import RoundsCase, model_sizes
    from moecomm_bench.ranks import plan
    from moecomm_bench.tune.rounds import Candidates, tune

    if context.invoked_subcommand is not None:
        given = [
            name
            for name in context.params
            if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
        ]
        if given:
            raise BadInput(given[0], context.params[given[0]], f"options behind the word {context.invoked_subcommand}")
        return
    name, count = plan(backend, ranks)
    case = RoundsCase(
        *model_sizes(model, None, None, None),
        ranks=count,
        backend=name,
        tokens=numbers("tokens", tokens),
        layouts=layout.split(","),
        payloads=[payload],
        sms=numbers("sms", sms),
        mode="eager" if name == "host" else "graph",
        replays=replays,
    )
    candidates = Candidates(case, numbers("chunks", chunks))
    candidates.check()
    if name == "host":
        raise Unsupported("moecomm tune needs GPUs: rounds on CPU ranks use no table")
    _say(tune(candidates, out, json))


@app.command()
def gemms(
    model: Models = MODELS,
    rows: Annotated[str, typer.Option(help="Rows of an expert to measure.")] = "8,32,64,128,256,512,1024,2048",
    ranks: Annotated[str, typer.Option(help="Ranks that share the experts (one is measured): 4,8.")] = "4,8",
    dtype: Annotated[str, typer.Option(help="bf16, fp8, or both: bf16,fp8.")] = "bf16,fp8",
    replays: Replays = 5,
    out: Out = None,
    json: Json = None,
) -> None:
    """Find the fastest schedules of grouped GEMMs, on one GPU, by shape and rows of an expert.

    They hold for the measured shapes. Shapes of an existing table that are not measured again are kept.
    """
    from moecomm_bench.gemm import sizes
    from moecomm_bench.ranks import leads
    from moecomm_bench.tune.gemms import Candidates, tune

    if leads():
        lists = numbers("ranks", ranks), numbers("rows", rows)
        _say(tune(Candidates(sizes(model.split(",")), *lists, dtype.split(","), replays), out, json))


@app.command()
def layers(
    model: Models = MODELS,
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank to measure, each in a Buffer of as many.")
    ] = "16,128,512,1024,4096,8192",
    replays: Replays = 7,
    ranks: Ranks = None,
    backend: Backend = "auto",
    out: Out = None,
    json: Json = None,
) -> None:
    """Find the sizes from which on fused layers are faster, for Buffer.moe(fused=None) on as many ranks.

    Bounds of an existing table for other numbers of ranks are kept.
    """
    from moecomm_bench import moe
    from moecomm_bench.gemm import sizes
    from moecomm_bench.options import mode_of
    from moecomm_bench.ranks import plan
    from moecomm_bench.tune.layers import tune

    name, count = plan(backend, ranks)
    case = moe.ModelsCase(
        sizes(model.split(",")), numbers("tokens", tokens), count, name, mode_of(None, name), replays=replays
    )
    _say(tune(case, out, json))


def _say(path: Path | None) -> None:
    if path is not None:
        Console().print(str(path), highlight=False)
