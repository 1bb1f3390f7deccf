"""The commands `moecomm bench decode` and `training`: many layers after each other, as models run them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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
    numbers,
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

    case = _case((model, hidden, topk, experts), tokens, (backend, ranks), routing, layout, payload)
    inner = _inner(model, intermediate) if gemms else 0
    found = measured.run(measured.Decode(case, layers, expert_us, delay_us, steps, inner))
    if found is not None:
        steps_table.show_decode(found, steps_table.console())
        _keep(found, json)


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

    case = _case((model, hidden, topk, experts), tokens, (backend, ranks), routing, "expert", "bf16", replays, peers)
    found = measured.run(measured.Training(case, _inner(model, intermediate), layers))
    if found is not None:
        steps_table.show_training(found, steps_table.console())
        _keep(found, json)


def _case(
    sizes: tuple[str, int | None, int | None, int | None],
    tokens: str,
    where: tuple[str, int | None],
    routing: Any,
    layout: str,
    payload: str,
    replays: int = 1,
    peers: bool = False,
) -> Any:
    from moecomm.bench.case import Case, model_sizes
    from moecomm.bench.ranks import plan

    backend, ranks = plan(*where)
    name, hidden, topk, experts = model_sizes(*sizes)
    return Case(
        model=name,
        hidden=hidden,
        topk=topk,
        experts=experts,
        ranks=ranks,
        backend=backend,
        tokens=numbers("tokens", tokens),
        layouts=layout.split(","),
        payloads=payload.split(","),
        sms=[0],
        mode="eager" if backend == "host" else "graph",
        replays=replays,
        ceiling=False,
        peers=peers,
        routing_file="" if routing is None else str(routing),
    )


def _inner(model: str, intermediate: int | None) -> int:
    from moecomm.router import MODELS

    return MODELS[model].intermediate if intermediate is None else intermediate


def _keep(result: dict[str, Any], json: Any) -> None:
    from moecomm.bench.kept import Kept

    if json is not None:
        Kept(json)(result)


def add_steps(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(decode)
    app.command()(training)
