"""The commands of `moecomm bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moecomm.tools.options import real, whole
from moecomm_bench import options
from moecomm_bench.kept import KeptResult, finish
from moecomm_bench.options import (
    INNER,
    REPLAYED,
    TOKENS,
    Backend,
    Default,
    DomainsRanks,
    Experts,
    Hidden,
    Intermediate,
    Json,
    Model,
    Models,
    Nic,
    Ranks,
    Replays,
    Routing,
    Topk,
    numbers,
)
from moecomm_bench.overlap_cli import add_overlap
from moecomm_bench.results_cli import add_results
from moecomm_bench.steps_cli import add_steps

if TYPE_CHECKING:
    from moecomm_bench.case import RoundsCase

app = typer.Typer(
    help="Measure dispatch, combine, layers, links, grouped GEMMs, fused operators, transfers of weights; also under "
    "torchrun.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Backends = Annotated[str, typer.Option("--backend", help="auto, host, lsa, gin or nvshmem; several: lsa,gin.")]
Limit = Annotated[
    float,
    typer.Option("--limit", callback=real(1e-3), help="Seconds per backend and size when several backends run."),
]
Layouts = Annotated[str, typer.Option("--layout", help="flat, expert, batched; several: flat,expert.")]
Payloads = Annotated[
    str,
    typer.Option(
        "--payload",
        help="Payload of dispatch: bf16, fp8, fp8-ue8m0; each fp8 also with -column; or a name of moecomm.formats; "
        "each with -given: cast before.",
    ),
]
Sms = Annotated[str, typer.Option(help="SMs (CPUs: threads), one or several; 0: from the tuning table.")]
Mode = Annotated[str | None, typer.Option(help="graph or eager; default: graph on GPUs.")]
Cold = Annotated[bool, typer.Option("--cold", help="Flush the caches before each operation.")]
Skew = Annotated[bool, typer.Option("--skew", help="Route a quarter of the tokens to one rank.")]
Chain = Annotated[int, typer.Option(callback=whole(0), help="Operations timed together; 0: chosen by size.")]
Ceiling = Annotated[bool, typer.Option("--ceiling/--no-ceiling", help="Measure the all-to-all ceiling first.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="NCCL (CPUs: gloo), and DeepEP where installed.")]
Others = Annotated[
    str,
    typer.Option(help="Libraries that are measured or named as absent: deep_ep, nccl_ep, flashinfer; several: a,b."),
]
Gemm = Annotated[bool, typer.Option("--overlap-gemm", help="Time a concurrent matmul with each operation.")]

SKEW = 0.25
SINGLES = Default(200, 0)
Singles = Annotated[
    int | None,
    SINGLES.option(
        "Single calls, caches flushed before each; 0: no such times, and none of eager calls beside graphs.", whole(0)
    ),
]
FEW_AND_MANY = Default("128,4096", "16,128")
FewAndMany = Annotated[str | None, FEW_AND_MANY.option(TOKENS)]
REPLAYS, SWEPT = Default(30, 5), Default(20, 5)
ManyReplays = Annotated[int | None, REPLAYS.option(REPLAYED, whole(1))]
FewerReplays = Annotated[int | None, SWEPT.option(REPLAYED, whole(1))]
GEMM_MODELS = "deepseek-v3,qwen3-235b,mixtral-8x7b,gpt-oss-120b"
EVERY_SIZE = Default(*(",".join(str(1 << power) for power in range(most)) for most in (15, 9)))  # to 16384, or to 256
MOVED, MOVED_INNER = Default(64, 8), Default[int | None](None, 256)
MOST_BYTES = Default(64 << 20, 1 << 20)
LAYER_TOKENS, LAYER_REPLAYS = Default("16,128,512,1024,2048,4096,8192", "16,128"), Default(10, 3)


@app.command()
def dispatch_combine(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: FewAndMany = None,
    layout: Layouts = "flat,expert",
    payload: Payloads = "bf16,fp8",
    sms: Sms = "0",
    mode: Mode = None,
    cold: Cold = False,
    skew: Skew = False,
    routing: Routing = None,
    chain: Chain = 0,
    replays: ManyReplays = None,
    singles: Singles = None,
    ceiling: Ceiling = True,
    peers: Peers = True,
    others: Others = "",
    overlap_gemm: Gemm = False,
    fp8_wire: Annotated[bool, typer.Option("--fp8-wire", help="Also time combines whose sums travel in FP8.")] = False,
    int8_wire: Annotated[bool, typer.Option("--int8-wire", help="Likewise in INT8.")] = False,
    rows_wire: Annotated[bool, typer.Option("--rows-wire", help="Likewise combines of rows, unsummed.")] = False,
    ranks: Ranks = None,
    backend: Backends = "auto",
    domain_ranks: DomainsRanks = "0",
    nic: Nic = "",
    limit: Limit = 120.0,
    json: Json = None,
) -> None:
    """Time complete dispatches, combines and pairs of both: alone, in a row, and eager; or through several backends."""
    from moecomm import config
    from moecomm_bench import backends

    sizes = FEW_AND_MANY.of(tokens, backend)
    times = {"replays": REPLAYS.of(replays, backend), "singles": SINGLES.of(singles, backend)}

    def case_of(way: backends.Way) -> RoundsCase:
        timing = {"cold": cold, "skew": SKEW * skew, "chain": chain, **times}
        beside = {"ceiling": ceiling, "peers": peers, "overlap_gemm": overlap_gemm}
        beside |= {"fp8_wire": fp8_wire, "int8_wire": int8_wire, "rows_wire": rows_wire}
        return options.case_of(
            (model, hidden, topk, experts),
            (sizes, layout, payload, sms),
            (way.backend, ranks, mode),
            routing,
            domain_ranks=way.domain_ranks,
            nic=nic,
            others=others.split(",") if others else [],
            **timing,
            **beside,
        )

    ways = backends.ways(backend, numbers("domain_ranks", domain_ranks))
    with config.variables({"MOECOMM_NIC": nic} if nic else {}, insist=True):
        if len(ways) == 1:
            _run_case(case_of(ways[0]), json)
            return
        kept = KeptResult(json)
        backends.dispatch_combine(ways, numbers("tokens", sizes), case_of, limit, kept)
    kept.show()


@app.command()
def sweep(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Annotated[str | None, EVERY_SIZE.option(TOKENS)] = None,
    layout: Layouts = "flat",
    payload: Payloads = "fp8",
    mode: Mode = None,
    replays: FewerReplays = None,
    ceiling: Ceiling = True,
    peers: Peers = True,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Run dispatch-combine over all sizes without pairs, for plots."""
    case = options.case_of(
        (model, hidden, topk, experts),
        (EVERY_SIZE.of(tokens, backend), layout, payload, "0"),
        (backend, ranks, mode),
        replays=SWEPT.of(replays, backend),
        pairs=False,
        ceiling=ceiling,
        peers=peers,
    )
    _run_case(case, json)


def _run_case(case: RoundsCase, json: Path | None) -> None:
    from moecomm_bench import dispatch_combine

    result = dispatch_combine.run(case)
    finish(result, json)


@app.command()
def deep_ep_layer(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: FewAndMany = None,
    mode: Mode = None,
    cold: Cold = False,
    chain: Chain = 0,
    replays: ManyReplays = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Measure the overhead of the deep_ep interface over moecomm's own calls, on the device and on the host."""
    from moecomm_bench import deep_ep_layer as measured

    case = options.case_of(
        (model, hidden, topk, experts),
        (FEW_AND_MANY.of(tokens, backend), "flat,batched", "bf16,fp8", "0"),
        (backend, ranks, mode),
        cold=cold,
        chain=chain,
        replays=REPLAYS.of(replays, backend),
        ceiling=False,
        peers=False,
    )
    result = measured.run(case)
    finish(result, json)


@app.command()
def latency(
    most_bytes: Annotated[int | None, MOST_BYTES.option("The largest size.", whole(1, 1 << 40))] = None,
    least_bytes: Annotated[int, typer.Option(callback=whole(1, 1 << 40), help="The smallest size.")] = 1,
    replays: FewerReplays = None,
    backend: Backends = "auto",
    limit: Limit = 120.0,
    json: Json = None,
) -> None:
    """Measure put + signal between two ranks, 1 B to 64 MB: half a round trip, through one or several backends."""
    from moecomm.errors import BadInput
    from moecomm_bench import backends, ranks
    from moecomm_bench import latency as measured

    most, repeated = MOST_BYTES.of(most_bytes, backend), SWEPT.of(replays, backend)
    sizes = [size for size in measured.SIZES if least_bytes <= size <= most]
    if not sizes or repeated < 1:
        raise BadInput(
            "least_bytes, most_bytes, replays", (least_bytes, most, repeated), "a power of two between; at least 1"
        )
    job: dict[str, Any] = {"sizes": sizes, "replays": repeated}
    ways = backends.ways(backend)
    if len(ways) > 1:
        kept = KeptResult(json)
        backends.latency(ways, job, limit, kept)
        kept.show()
        return
    name, count = ranks.plan(backend, None)
    count = count if ranks.under_torchrun() else 2
    by_rank = ranks.on_ranks("moecomm_bench.latency:run_rank", {"backend": name, **job}, count)
    if by_rank is not None:
        result = {"benchmark": "latency", "backend": name, "rows": measured.merge(by_rank)}
        finish(result, json)


@app.command()
def all_to_all(
    part_bytes: Annotated[
        int, typer.Option(callback=whole(0, 1 << 34), help="Bytes to each peer; 0: 64 MB, on CPUs 8 MB.")
    ] = 0,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Measure the most that the links carry, by method and SMs."""
    from moecomm_bench import ceiling
    from moecomm_bench.ranks import on_ranks, plan

    name, count = plan(backend, ranks)
    by_rank = on_ranks("moecomm_bench.ceiling:run_rank", {"backend": name, "part_bytes": part_bytes}, count)
    if by_rank is not None:
        result = {"benchmark": "all-to-all", "backend": name, "ranks": count, "rows": ceiling.merge(by_rank)}
        finish(result, json)


@app.command()
def gemm(
    model: Models = GEMM_MODELS,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Annotated[str, typer.Option(help=TOKENS)] = "16,128,512,1024,2048,4096,8192",
    ranks: Annotated[str, typer.Option(help="Ranks that share the experts (one is measured): 4,8.")] = "4,8",
    dtype: Annotated[
        str, typer.Option(help="Some of bf16, fp8 (e4m3 with scales), mxfp4, packed-mxfp4 (with FP8 rows).")
    ] = "bf16",
    every_schedule: Annotated[bool, typer.Option("--every-schedule", help="Measure every schedule.")] = False,
    others: Annotated[str, typer.Option(help="Libraries that are measured or named as absent: deep_gemm.")] = "",
    replays: Replays = 5,
    json: Json = None,
) -> None:
    """Time the grouped GEMMs of one rank's experts, alternating with torch's. On one GPU."""
    from moecomm_bench import gemm as measured
    from moecomm_bench.ranks import leads, need_gpu

    if not leads():
        return
    models = measured.sizes(model.split(","), hidden=hidden, intermediate=intermediate, topk=topk, num_experts=experts)
    lists = numbers("ranks", ranks), numbers("tokens", tokens)
    dtypes = dtype.split(",")
    how: dict[str, Any] = {"replays": replays, "dtypes": dtypes, "others": others.split(",") if others else []}
    measured.check(models, *lists, **how)
    need_gpu("bench gemm", "CPU ranks multiply with torch")
    result = measured.run(models, *lists, every_schedule=every_schedule, **how)
    finish(result, json)


@app.command()
def moe(
    model: Models = GEMM_MODELS,
    hidden: Hidden = None,
    intermediate: Annotated[int | None, INNER.option("Columns inside an expert.", whole(1))] = None,
    topk: Topk = None,
    experts: Experts = None,
    tokens: Annotated[str | None, LAYER_TOKENS.option(TOKENS)] = None,
    mode: Mode = None,
    replays: Annotated[int | None, LAYER_REPLAYS.option(REPLAYED, whole(1))] = None,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also measure torch's layer and other libraries' experts.")
    ] = True,
    fp8: Annotated[bool, typer.Option("--fp8", help="Also measure our layer with FP8 weights.")] = False,
    mxfp4: Annotated[
        bool, typer.Option("--mxfp4", help="Also measure our layer with MXFP4 weights, and packed ones.")
    ] = False,
    channels: Annotated[
        bool, typer.Option("--channels", help="Also measure our layer with FP8 and INT8 weights, a scale a channel.")
    ] = False,
    rows_wire: Annotated[
        bool, typer.Option("--rows-wire", help="Also measure our layer and combine with rows that return unsummed.")
    ] = False,
    others: Annotated[
        str, typer.Option(help="Libraries whose FP8 layers are measured or named as absent, beside --fp8: deep_gemm.")
    ] = "",
    room: Annotated[int, typer.Option(callback=whole(0), help="max_tokens of Buffers; 0: the measured size.")] = 0,
    singles: Singles = None,
    sustained: Annotated[
        float, typer.Option(callback=real(0, 60), help="Seconds of a run without a pause, on GPUs; 0: no such times.")
    ] = 0.5,
    routing: Routing = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time complete expert layers: Buffer.moe, its parts, and torch's all_to_all and grouped GEMMs, alternating."""
    from moecomm_bench import gemm as sizes
    from moecomm_bench import moe as measured
    from moecomm_bench import ranks as of_ranks

    name, count = of_ranks.plan(backend, ranks)
    models = sizes.sizes(model.split(","), hidden=hidden, intermediate=intermediate, topk=topk, num_experts=experts)
    if (inner := INNER.of(intermediate, backend)) is not None and intermediate is None:
        models = [replace(one, intermediate=inner, name=one.name and f"{one.name} (I = {inner})") for one in models]
    case = measured.ModelsCase(
        models,
        numbers("tokens", LAYER_TOKENS.of(tokens, backend)),
        ranks=count,
        backend=name,
        mode=options.mode_of(mode, name),
        replays=LAYER_REPLAYS.of(replays, backend),
        peers=peers,
        fp8=fp8,
        mxfp4=mxfp4,
        channels=channels,
        rows_wire=rows_wire,
        others=others.split(",") if others else [],
        room=room,
        singles=SINGLES.of(singles, backend),
        sustained_s=sustained,
        routing_file="" if routing is None else str(routing),
    )
    result = measured.run(case)
    finish(result, json)


@app.command()
def transfer(
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    intermediate: Annotated[int | None, MOVED_INNER.option("Columns inside an expert.", whole(1))] = None,
    experts: Annotated[int | None, MOVED.option("Experts of all ranks.", whole(1))] = None,
    sets: Annotated[
        str, typer.Option(help="apart: half of the ranks train, the others serve; overlap: all do both; several: a,b.")
    ] = "apart,overlap",
    cast: Annotated[
        str, typer.Option(help="Casts on the way, by names of moecomm.transfer; bf16: none; several: a,b.")
    ] = "bf16,fp8,mxfp8,nvfp4,mxfp4,int8_token",
    replays: FewerReplays = None,
    ranks: Ranks = None,
    backend: Backend = "auto",
    json: Json = None,
) -> None:
    """Time transfers of weights from trainer to engine, beside broadcast, all-gather and a copy of the bytes alone."""
    from moecomm_bench import transfer as measured
    from moecomm_bench.case import model_sizes
    from moecomm_bench.ranks import plan

    name, count = plan(backend, ranks)
    _, width, _, _ = model_sizes(model, hidden, None, None)
    found = measured.run(
        measured.TransferCase(
            model=model,
            hidden=width,
            intermediate=options.inner_of(model, MOVED_INNER.of(intermediate, backend)),
            experts=MOVED.of(experts, backend),
            ranks=count,
            backend=name,
            sets=sets.split(","),
            casts=cast.split(","),
            replays=SWEPT.of(replays, backend),
        )
    )
    finish(found, json)


add_overlap(app)
add_steps(app)
add_results(app)
