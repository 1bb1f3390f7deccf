"""The commands `moecomm bench decode` and `training`: many layers after each other, as models run them."""

from __future__ import annotations

from typing import Annotated

import typer

from moecomm.tools.options import real, whole
from moecomm_bench.kept import finish
from moecomm_bench.options import (
    INNER,
    REPLAYED,
    TOKENS,
    Backend,
    Default,
    Experts,
    Hidden,
    Intermediate,
    Json,
    Model,
    Ranks,
    Routing,
    Topk,
    case_of,
    inner_of,
)

DECODED, STEPS = Default(60, 4), Default(100, 10)  # layers, steps
TRAINED, TRAINED_TOKENS, REPLAYS = Default(4, 2), Default("4096", "128"), Default(10, 3)
_LAYERS = "Layers of a step."


def decode(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Annotated[str, typer.Option(help=TOKENS)] = "1,128",
    layout: Annotated[str, typer.Option(help="flat, expert, batched; several: flat,expert.")] = "flat,expert,batched",
    payload: Annotated[str, typer.Option(help="Payload of dispatch: bf16, fp8; several: bf16,fp8.")] = "fp8",
    layers: Annotated[int | None, DECODED.option(_LAYERS, whole(1, 1 << 12))] = None,
    expert_us: Annotated[
        float, typer.Option(callback=real(0, 1e6), help="Microseconds that stand in for a layer's experts.")
    ] = 50.0,
    delay_us: Annotated[
        float, typer.Option(callback=real(0, 1e6), help="The most microseconds that a rank comes late to a layer.")
    ] = 20.0,
    steps: Annotated[int | None, STEPS.option("Timed steps.", whole(1))] = None,
    gemms: Annotated[bool, typer.Option("--gemms", help="Also measure Buffer.moe, with the experts' GEMMs.")] = False,
    routing: Routing = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time a decode step: layers of dispatch, experts and combine in one graph, with ranks in step and out of step."""
    from moecomm_bench import decode as measured

    sizes, lists = (model, hidden, topk, experts), (tokens, layout, payload, "0")
    case = case_of(sizes, lists, (backend, ranks, None), routing, replays=1, ceiling=False, peers=False)
    inner = inner_of(model, intermediate) if gemms else 0
    counts = DECODED.of(layers, backend), STEPS.of(steps, backend)
    found = measured.run(measured.Decode(case, counts[0], expert_us, delay_us, counts[1], inner))
    finish(found, json)


def training(
    model: Model = "qwen3-235b",
    hidden: Hidden = None,
    intermediate: Annotated[int | None, INNER.option("Columns inside an expert.", whole(1))] = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Annotated[str | None, TRAINED_TOKENS.option(TOKENS)] = None,
    layers: Annotated[int | None, TRAINED.option(_LAYERS, whole(1, 1 << 12))] = None,
    replays: Annotated[int | None, REPLAYS.option(REPLAYED, whole(1))] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also measure torch's layer.")] = True,
    routing: Routing = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time a training step of expert layers: forward, and forward with backward."""
    from moecomm_bench import training as measured

    sizes = (model, hidden, topk, experts)
    lists = (TRAINED_TOKENS.of(tokens, backend), "expert", "bf16", "0")
    repeated = REPLAYS.of(replays, backend)
    case = case_of(sizes, lists, (backend, ranks, None), routing, replays=repeated, ceiling=False, peers=peers)
    inner = inner_of(model, INNER.of(intermediate, backend))
    found = measured.run(measured.Training(case, inner, TRAINED.of(layers, backend)))
    finish(found, json)


def add_steps(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(decode)
    app.command()(training)
