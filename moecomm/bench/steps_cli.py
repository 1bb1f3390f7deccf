"""The commands `moecomm bench decode` and `training`: many layers after each other, as models run them."""

from __future__ import annotations

from typing import Annotated

import typer

from moecomm.bench.kept import keep
from moecomm.bench.options import (
    Backend,
    Experts,
    Hidden,
    Intermediate,
    Json,
    Ranks,
    Replays,
    Routing,
    Topk,
    case_of,
    real,
    whole,
)

Model = Annotated[str, typer.Option(help="Model that sets the sizes (a name in moecomm.router.MODELS).")]
Tokens = Annotated[str, typer.Option(help="Tokens of a rank: one number or several, 1,128.")]
Layers = Annotated[int, typer.Option(callback=whole(1, 1 << 12), help="Layers of a step.")]


def decode(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Tokens = "1,128",
    layout: Annotated[str, typer.Option(help="flat, expert, batched; several: flat,expert.")] = "flat,expert,batched",
    payload: Annotated[str, typer.Option(help="Payload of dispatch: bf16, fp8; several: bf16,fp8.")] = "fp8",
    layers: Layers = 60,
    expert_us: Annotated[
        float, typer.Option(callback=real(0, 1e6), help="Microseconds that stand in for a layer's experts.")
    ] = 50.0,
    delay_us: Annotated[
        float, typer.Option(callback=real(0, 1e6), help="The most microseconds that a rank comes late to a layer.")
    ] = 20.0,
    steps: Annotated[int, typer.Option(callback=whole(1), help="Timed steps.")] = 100,
    gemms: Annotated[bool, typer.Option("--gemms", help="Also measure Buffer.moe, with the experts' GEMMs.")] = False,
    routing: Routing = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time a decode step: layers of dispatch, experts and combine in one graph, with ranks in step and out of step."""
    from moecomm.bench import decode as measured
    from moecomm.bench import steps_table

    sizes, lists = (model, hidden, topk, experts), (tokens, layout, payload, "0")
    case = case_of(sizes, lists, (backend, ranks, None), routing, replays=1, ceiling=False, peers=False)
    inner = _inner(model, intermediate) if gemms else 0
    found = measured.run(measured.Decode(case, layers, expert_us, delay_us, steps, inner))
    if found is not None:
        steps_table.show_decode(found, steps_table.console())
        keep(found, json)


def training(
    model: Model = "qwen3-235b",
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Tokens = "4096",
    layers: Layers = 4,
    replays: Replays = 10,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also measure torch's layer.")] = True,
    routing: Routing = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time a training step of expert layers: forward, and forward with backward."""
    from moecomm.bench import steps_table
    from moecomm.bench import training as measured

    sizes, lists = (model, hidden, topk, experts), (tokens, "expert", "bf16", "0")
    case = case_of(sizes, lists, (backend, ranks, None), routing, replays=replays, ceiling=False, peers=peers)
    found = measured.run(measured.Training(case, _inner(model, intermediate), layers))
    if found is not None:
        steps_table.show_training(found, steps_table.console())
        keep(found, json)


def _inner(model: str, intermediate: int | None) -> int:
    from moecomm.router import MODELS

    return MODELS[model].intermediate if intermediate is None else intermediate


def add_steps(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(decode)
    app.command()(training)
