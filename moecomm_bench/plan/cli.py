"""The command `moecomm plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moecomm.tools.options import real, whole, written
from moecomm_bench.options import Experts, GatedModel, Hidden, Intermediate, Json, Routing, Topk
from moecomm_bench.simulate.options import NIC, NicGbs

app = typer.Typer(
    help="Say which ranks, slots, format and layout a layer should take, by predictions.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def plan(
    memory: Annotated[
        float, typer.Option(callback=real(0), help="GiB of a GPU for the weights of experts and the window.")
    ],
    tokens: Annotated[
        int, typer.Option(callback=whole(1), help="Tokens of a rank in a step: 128 in a decode, 4096 in a prefill.")
    ] = 128,
    us: Annotated[
        float, typer.Option(callback=real(0), help="Target: most microseconds of a layer; 0: the least time.")
    ] = 0.0,
    model: GatedModel = "deepseek-v3",
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    routing: Routing = None,
    layers: Annotated[
        int | None,
        typer.Option(callback=whole(1), help="MoE layers whose weights a GPU holds; default: the recorded ones, or 1."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of GPUs to choose from.")] = "2,4,8,16,32,64",
    domain_ranks: Annotated[int, typer.Option(callback=whole(1), help="Most GPUs of an NVLink domain.")] = 8,
    formats: Annotated[
        str, typer.Option("--format", help="Formats of weights and dispatched rows to choose from: bf16, fp8.")
    ] = "bf16,fp8",
    layout: Annotated[str, typer.Option(help="Layouts to choose from: expert, batched, flat.")] = "expert,batched",
    nic_gbs: NicGbs = NIC[0],
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(callback=written, help="Plot to this file, a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Say which ranks, slots, format and layout a layer should take: by a model, not a measurement.

    Exit code 1 if no choice fits the memory and meets the target.
    """
    from moecomm_bench import replay
    from moecomm_bench.options import numbers
    from moecomm_bench.plan.case import PlannedCase
    from moecomm_bench.plan.search import plan as planned
    from moecomm_bench.plan.table import show
    from moecomm_bench.simulate.cli import domain_of, keep, model_of
    from moecomm_bench.simulate.domain import fitted_efficiency
    from moecomm_bench.simulate.model import Machine
    from moecomm_bench.simulate.nic import ModelNic
    from moecomm_bench.table import console

    own_gate = topk is None and experts is None
    name, sizes, gate = model_of((model, hidden, intermediate, topk, experts), grouped=own_gate)
    file = "" if routing is None else str(routing)
    held = layers or (len(replay.recorded(file).layers) if file else 1)
    case = PlannedCase(
        name,
        *sizes,
        gate,
        memory,
        tokens,
        us,
        held,
        numbers("ranks", ranks),
        domain_ranks,
        formats.split(","),
        layout.split(","),
        file,
    )
    nic = ModelNic(nic_gbs, *NIC[1:], fitted_efficiency())
    result = planned(case, Machine(domain_of(None), nic))
    show(result, console())
    keep(result, json)
    if plot is not None:
        from moecomm_bench import plot as pictures

        pictures.save([result], plot, pictures.digest_of(result))
        console().print(str(plot), highlight=False)
    if result["plan"] is None:
        raise typer.Exit(1)
