"""The commands `moecomm bench overlap` and `all-gather-study`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moecomm.tools.options import real
from moecomm_bench.kept import KeptResult, finish
from moecomm_bench.options import Backend, Json, Ranks, Replays

Limit = Annotated[float, typer.Option(callback=real(1e-3), help="Seconds for an operator.")]


def overlap(
    operator: Annotated[str, typer.Option(help="Operators of moecomm.overlap; default: all.")] = "",
    case: Annotated[str, typer.Option(help="Measure only cases with this in their name.")] = "",
    dtype: Annotated[str, typer.Option(help="Measure only cases of this dtype: bf16, fp16, fp32 or fp8.")] = "",
    replays: Replays = 10,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also measure NCCL and torch.")] = True,
    every_schedule: Annotated[
        bool, typer.Option("--every-schedule", help="Also measure ours with each schedule.")
    ] = False,
    ranks: Ranks = None,
    backend: Backend = "auto",
    limit: Limit = 120.0,
    json: Json = None,
) -> None:
    """Time the fused operators beside products and collectives of torch and NCCL, alternating in graphs."""
    from moecomm.tools.launch import RanksFailed
    from moecomm_bench import operator_cases, operators
    from moecomm_bench import ranks as of_ranks

    name, count = of_ranks.plan(backend, ranks)
    kept, failed = KeptResult(json), None
    rows: list[dict[str, Any]] = []
    asked = operator.split(",") if operator else operator_cases.OPERATORS
    given: dict[str, Any] = {"dtype": dtype, "replays": replays, "peers": peers, "every_schedule": every_schedule}
    every = [operators.OperatorRun(wanted, count, name, case, **given) for wanted in asked]
    if not operator:  # all that have such cases
        every = [settings for settings in every if settings.cases] or every[:1]
    for settings in every:
        try:
            found = operators.run(settings, limit)
        except RanksFailed as error:  # the other operators have ranks of their own
            failed, found = (
                error,
                [{"operator": settings.operator, "case": case, "dtype": dtype, "who": "", "why": str(error)}],
            )
        if found is None:
            continue
        rows += found
        # Each operator is kept at once, so that a later one that fails or hangs loses nothing.
        kept({"benchmark": "overlap", "backend": name, "ranks": count, "replays": replays, "rows": rows})
        kept.show(found)
    if failed is not None:
        raise failed


def all_gather_study(
    replays: Replays = 10,
    ranks: Ranks = None,
    backend: Backend = "auto",
    limit: Limit = 120.0,
    json: Json = None,
) -> None:
    """Time the ways to gather and multiply that a study of nvFuser compares, and the fused operator, in graphs."""
    from moecomm_bench import gather_study
    from moecomm_bench import ranks as of_ranks

    name, count = of_ranks.plan(backend, ranks)
    rows = gather_study.run(count, name, replays, limit)
    if rows is not None:
        about = {"benchmark": "all-gather-study", "backend": name, "ranks": count, "replays": replays}
        finish({**about, "size": gather_study.SIZE, "dtype": "fp16", "rows": rows}, json)


def add_overlap(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(overlap)
    app.command()(all_gather_study)
