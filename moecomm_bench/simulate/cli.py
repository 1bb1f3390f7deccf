"""The command `moecomm simulate`: predictions, their errors, and the fit behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moecomm.tools.options import real, whole, written
from moecomm_bench.kept import keep
from moecomm_bench.options import Experts, GatedModel, Hidden, Intermediate, Json, Routing, Topk
from moecomm_bench.simulate.options import NIC, NicEfficiency, NicGbs, NicLatency, NicMessages

if TYPE_CHECKING:
    from moecomm_bench.simulate.domain import Domain
    from moecomm_bench.simulate.routing import DrawnGate

app = typer.Typer(
    help="Predict the times of dispatch, combine and layers over any number of NVLink domains.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Parameters = Annotated[
    Path | None, typer.Option(help="Output of `simulate fit`; default: the parameters in the package.")
]


@app.callback()
def predict(
    context: typer.Context,
    domains: Annotated[str, typer.Option(help="Numbers of NVLink domains: one or several.")] = "1,2,4,8",
    ranks: Annotated[int, typer.Option(callback=whole(1, 1 << 16), help="GPUs of a domain.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens of a rank: one number or several.")] = "1,128,4096",
    model: GatedModel = "deepseek-v3",
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    grouped: Annotated[bool, typer.Option("--grouped/--ungrouped", help="Keep to the model's best groups.")] = True,
    layout: Annotated[str, typer.Option(help="flat, expert or batched.")] = "flat",
    payload: Annotated[str, typer.Option(help="Payload of dispatch: bf16, fp8, fp8-ue8m0.")] = "fp8",
    wire: Annotated[
        str, typer.Option(help="Reduced rows in combine: bf16, or fp32 for wire='exact' (flat: between domains).")
    ] = "bf16",
    skew: Annotated[float, typer.Option(callback=real(0, 1), help="Fraction of the tokens that picks rank 0.")] = 0.0,
    routing: Routing = None,
    algorithm: Annotated[str, typer.Option(help="ht, ll, or auto: as moecomm does.")] = "auto",
    num_sms: Annotated[
        int, typer.Option(callback=whole(0, 1024), help="Blocks of dispatch and combine; 0: as the table says.")
    ] = 0,
    chunk_tokens: Annotated[
        int, typer.Option(callback=whole(1, 1 << 16), help="HT: tokens signaled together between domains.")
    ] = 32,
    nic_gbs: NicGbs = NIC[0],
    nic_latency_us: NicLatency = NIC[1],
    nic_mega_messages: NicMessages = NIC[2],
    nic_efficiency: NicEfficiency = 0.0,
    nvlink_gbs: Annotated[
        float, typer.Option(callback=real(0), help="Limit NVLink to this bandwidth, GB/s; 0: as measured.")
    ] = 0.0,
    gemm_us: Annotated[float, typer.Option(callback=real(0), help="Time of the experts' GEMMs; 0: roofline.")] = 0.0,
    gemm_tflops: Annotated[float, typer.Option(callback=real(0), help="Speed for the roofline; 0: as measured.")] = 0.0,
    hbm_gbs: Annotated[
        float, typer.Option(callback=real(0), help="Memory bandwidth for the roofline (default: H200).")
    ] = 4800.0,
    parts: Annotated[
        int, typer.Option(callback=whole(1, 1 << 16), help="Overlapped layer: number of parts of the tokens.")
    ] = 2,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs in place of --domains: up to --ranks of them are one domain.")
    ] = "",
    layers: Annotated[int, typer.Option(callback=whole(1), help="MoE layers whose weights a GPU holds.")] = 1,
    memory: Annotated[
        float, typer.Option(callback=real(0), help="GiB of a GPU for weights and window: name the fewest GPUs.")
    ] = 0.0,
    us: Annotated[
        float, typer.Option(callback=real(0), help="Most microseconds of a layer: name the fewest GPUs.")
    ] = 0.0,
    parameters: Parameters = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(callback=written, help="Plot to this file, a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Predict dispatch, combine and layer time over any number of NVLink domains: a model, not a measurement."""
    if context.invoked_subcommand is not None:
        return
    from moecomm_bench.columns import console
    from moecomm_bench.options import numbers
    from moecomm_bench.simulate import predict as predicted
    from moecomm_bench.simulate.domain import fitted_efficiency
    from moecomm_bench.simulate.memory import fewest
    from moecomm_bench.simulate.model import Machine
    from moecomm_bench.simulate.nic import ModelNic
    from moecomm_bench.simulate.table import show_predictions

    name, shape, gate = model_of((model, hidden, intermediate, topk, experts), grouped)
    asked = predicted.SimulatedCase(
        name,
        *shape,
        gate,
        numbers("domains", domains),
        ranks,
        numbers("tokens", tokens),
        layout=layout,
        payload=payload,
        wire=wire,
        skew=skew,
        algorithm=algorithm,
        gemm_us=gemm_us,
        gemm_tflops=gemm_tflops,
        hbm_gbs=hbm_gbs,
        parts=parts,
        routing_file="" if routing is None else str(routing),
        gpus=numbers("gpus", gpus) if gpus else [],
        layers=layers,
    )
    share = nic_efficiency or fitted_efficiency(parameters)
    nic = ModelNic(nic_gbs, nic_latency_us, nic_mega_messages, share)
    result = predicted.predict(asked, Machine(domain_of(parameters, nvlink_gbs), nic, chunk_tokens, num_sms))
    show_predictions(result, console())
    for line in fewest(result["rows"], memory, us) if memory or us else ():
        console().print(line, highlight=False)
    keep(result, json)
    if plot is not None:
        from moecomm_bench import plot as pictures

        pictures.save([result], plot, pictures.digest_of(result))
        console().print(str(plot), highlight=False)


@app.command()
def check(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON of the benchmark; default: bench/results of a checkout."),
    ] = None,
    nic_gbs: NicGbs = NIC[0],
    nic_latency_us: NicLatency = NIC[1],
    nic_mega_messages: NicMessages = NIC[2],
    nic_efficiency: NicEfficiency = 0.0,
    parameters: Parameters = None,
    json: Json = None,
) -> None:
    """Compare predictions with measured and published figures, row by row."""
    from moecomm_bench.columns import console
    from moecomm_bench.simulate.check import check as compared
    from moecomm_bench.simulate.domain import content
    from moecomm_bench.simulate.nic import ModelNic
    from moecomm_bench.simulate.table import show_check

    nic = ModelNic(nic_gbs, nic_latency_us, nic_mega_messages, nic_efficiency or 1.0)
    nic.check()
    fitted = None if nic_efficiency else content(parameters).get("nic")
    found = compared(_kept() if results is None else results, domain_of(parameters), nic, fitted)
    show_check(found, console())
    keep({"benchmark": "simulate-check", **found}, json)


def _kept() -> list[Path]:
    """Return the results of a checkout, from any working directory; a wheel has none."""
    return sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@app.command()
def fit(
    out: Annotated[Path, typer.Option(callback=written, help="File for the parameters.")],
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON of dispatch-combine or sweep; default: bench/results of a checkout."),
    ] = None,
) -> None:
    """Fit the terms of one domain to results, and the share of a NIC to published times."""
    from moecomm_bench.columns import console
    from moecomm_bench.simulate import fit as fitted
    from moecomm_bench.simulate.table import show_fit

    found = fitted.fit_all(_kept() if results is None else results)
    fitted.write(out, found)
    show_fit(found, console())
    console().print(str(out), highlight=False)


def model_of(
    sizes: tuple[str, int | None, int | None, int | None, int | None], grouped: bool
) -> tuple[str, tuple[int, int], DrawnGate]:
    """Return (name, (hidden, intermediate), gate); the name is "" if a given number differs from the model's."""
    from moecomm.errors import BadInput
    from moecomm.router import MODELS
    from moecomm_bench.simulate.routing import DrawnGate

    model, *given = sizes
    if model not in MODELS:
        raise BadInput("model", repr(model), f"one of {', '.join(MODELS)}")
    shape = MODELS[model]
    own = [shape.hidden, shape.intermediate, shape.topk, shape.num_experts]
    hidden, intermediate, topk, experts = (o if g is None else g for o, g in zip(own, given, strict=True))
    groups = (shape.num_groups, shape.topk_groups) if grouped else (1, 1)
    name = model if [hidden, intermediate, topk, experts] == own else ""
    return name, (hidden, intermediate), DrawnGate(experts, topk, *groups)


def domain_of(parameters: Path | None, nvlink_gbs: float = 0.0) -> Domain:
    from moecomm_bench.simulate.domain import load

    found = load(parameters)
    return found.with_nvlink(nvlink_gbs) if nvlink_gbs else found
