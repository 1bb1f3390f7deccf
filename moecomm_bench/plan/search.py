"""The candidates, their time and memory, and the choice among them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from moecomm import backends
from moecomm.ranks.settings import CAPACITY_FACTOR, Settings
from moecomm_bench import replay
from moecomm_bench.plan.case import PlannedCase, expert_bytes
from moecomm_bench.plan.slots import LayerRouting, Slots, ways
from moecomm_bench.simulate.domain import worst_error
from moecomm_bench.simulate.model import Machine
from moecomm_bench.simulate.predict import SimulatedCase, row

GIB = 1 << 30
_BACKEND = "lsa"


@dataclass(frozen=True)
class Room:
    """The window of a rank.

    Attributes:
        nbytes: size of the window.
        capacity_factor, window_bytes: arguments of the Buffer; None: the default.
        rows: room of a dispatch, in rows.
        needed: expected rows of the busiest rank in the busiest layer; in `batched`, those of the busiest slot times
            the slots of a rank.
    """

    nbytes: int
    capacity_factor: float | None
    window_bytes: int | None
    rows: int
    needed: float


def plan(case: PlannedCase, machine: Machine) -> dict[str, Any]:
    """Return {benchmark, prediction, case, inputs, rows, plan, lacks}.

    A row is the best candidate for a number of GPUs. `plan` is the best of the rows; if it is None, `lacks` says what
    is missing. Raises BadInput.
    """
    case.check()
    rows = [_best(case, list(_candidates(case, ranks, machine))) for ranks in case.ranks]
    chosen = _best(case, rows)
    met = chosen["fits"] and chosen["meets"]
    return {
        "benchmark": "plan",
        "prediction": "by a model, not measured",
        "case": replay.shown(case),
        "inputs": {
            "domain": machine.domain.name,
            "nic_gbs": machine.nic.gbs,
            "fitted_ranks": list(machine.domain.ranks),
            "routing": _simulated(case, case.ranks[0], "bf16", "expert").routing,
        },
        "rows": rows,
        "plan": chosen if met else None,
        "lacks": "" if met else _lacks(case, rows),
    }


def _best(case: PlannedCase, candidates: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best candidate: one that fits and meets the target if there is one, else the one that lacks least.

    With a target: the fewest GPUs, among these the least time. Without: the least time. Ties go to fewer GPUs, then to
    less memory, then to the first.
    """

    def key(found: dict[str, Any]) -> tuple[Any, ...]:
        if not found["fits"]:
            return 2, found["memory_gib"]
        if not found["meets"]:
            return 1, found["us"]
        size = found["gpus"] if case.target_us else 0
        return 0, size, found["us"], found["gpus"], found["memory_gib"]

    return min(candidates, key=key)


def _lacks(case: PlannedCase, rows: list[dict[str, Any]]) -> str:
    """Return what all candidates lack: memory or time, and how much."""
    fitting = [found for found in rows if found["fits"]]
    if not fitting:
        least = min(rows, key=lambda found: found["memory_gib"])
        more = least["memory_gib"] - case.memory_gib
        return (
            f"memory: {least['gpus']} GPUs take the least, {least['memory_gib']:.2f} GiB each, {more:.2f} GiB more "
            f"than {case.memory_gib:g} GiB"
        )
    least = min(fitting, key=lambda found: found["us"])
    larger = [found for found in rows if not found["fits"] and found["meets"]]
    nearest = min(larger, key=lambda found: found["memory_gib"], default=None)
    with_more = f"; {nearest['gpus']} GPUs meet it with {-nearest['memory_margin_gib']:.2f} GiB more" if nearest else ""
    return (
        f"time: {least['gpus']} GPUs are the fastest that have the memory, with {least['us']:.1f} us a layer, "
        f"{least['us'] - case.target_us:.1f} us more than {case.target_us:g} us{with_more}"
    )


def _candidates(case: PlannedCase, ranks: int, machine: Machine) -> Iterator[dict[str, Any]]:
    for slots in ways(case, ranks):
        for name in case.formats:
            for layout in case.layouts:
                yield _candidate(case, ranks, slots, name, layout, machine)


def _candidate(case: PlannedCase, ranks: int, slots: Slots, name: str, layout: str, machine: Machine) -> dict[str, Any]:
    """Return a candidate as a row of the result; times are means over layers, in microseconds."""
    asked = _simulated(case, ranks, name, layout)
    weight = expert_bytes(name, case.hidden, case.intermediate)
    more = {"slots": slots.of_rank, "expert_bytes": weight}
    layers = [row(asked, machine, one.spread, case.tokens, **more) for one in slots.layers]
    us = [one["layer"]["serial_us"] for one in layers]
    rounds = {what: statistics.mean(one[what]["us"] for one in layers) for what in ("dispatch", "combine")}
    room = window(case, ranks, slots, layout)
    weights = case.layers * slots.of_rank * weight
    layer_us, memory = statistics.mean(us), (weights + room.nbytes) / GIB
    domains = case.domains(ranks)[0]
    fitted = domains == 1 and ranks in machine.domain.ranks
    errors = {operation.what: worst_error(operation) for operation in asked.operations} if fitted else {}
    at_worst = sum(rounds[what] * error / (1 - error) for what, error in errors.items())
    return {
        "gpus": ranks,
        "domains": domains,
        "slots": slots.of_rank,
        "replicas": slots.replicas,
        "placed": slots.placement is not None,
        "format": name,
        "layout": layout,
        "tokens": case.tokens,
        "us": round(layer_us, 3),
        "busiest_layer_us": round(max(us), 3),
        "at_worst_us": round(layer_us + at_worst, 3) if fitted else None,
        "dispatch_us": round(rounds["dispatch"], 3),
        "gemm_us": round(statistics.mean(one["layer"]["gemm_us"] for one in layers), 3),
        "combine_us": round(rounds["combine"], 3),
        "memory_gib": round(memory, 4),
        "weights_gib": round(weights / GIB, 4),
        "window_gib": round(room.nbytes / GIB, 4),
        "capacity_factor": room.capacity_factor,
        "window_bytes": room.window_bytes,
        "rows": room.rows,
        "rows_needed": round(room.needed, 1),
        "fits": memory <= case.memory_gib,
        "meets": not case.target_us or layer_us <= case.target_us,
        "memory_margin_gib": round(case.memory_gib - memory, 4),
        "time_margin_us": round(case.target_us - layer_us, 3) if case.target_us else None,
    }


def _simulated(case: PlannedCase, ranks: int, name: str, layout: str) -> SimulatedCase:
    domains, width = case.domains(ranks)
    sizes = case.model, case.hidden, case.intermediate, case.gate, [domains], width, [case.tokens]
    return SimulatedCase(*sizes, layout=layout, payload=name, routing_file=case.routing_file)


def window(case: PlannedCase, ranks: int, slots: Slots, layout: str) -> Room:
    """Return the window of a Buffer for one round, with room for the busiest rank's expected rows.

    By default a Buffer has room for CAPACITY_FACTOR times the rows of even routing, or more. If the busiest rank gets
    more rows than that leaves room for, the factor grows in proportion.
    """
    domains, width = case.domains(ranks)
    sizes = ranks, case.hidden, case.gate.experts, case.gate.topk, case.tokens, torch.bfloat16, _BACKEND, None
    settings = Settings(*sizes, domain_ranks=width if domains > 1 else None).placed(slots.placement)
    settings.check()
    busiest = settings.extremes[0]
    needed = max(_rows(one, layout, ranks * case.tokens, slots.of_rank) for one in slots.layers)
    rows = settings.capacity_rows(layout, rank=busiest)
    if rows < min(CAPACITY_FACTOR * needed, settings.worst_rows(layout, rank=busiest)):
        even = replace(settings, capacity_factor=1.0).capacity_rows(layout, rank=busiest)
        settings = replace(settings, capacity_factor=ceil(100 * CAPACITY_FACTOR * needed / even) / 100)
        rows = settings.capacity_rows(layout, rank=busiest)
    if layout == "batched":  # a default window counts this layout only up to 2 GiB
        two_rounds = 2 * settings.round_bytes(layout, -(-rows // slots.of_rank))
        if two_rounds > settings.default_heap():
            settings = replace(settings, window_bytes=two_rounds)
    nbytes = settings.total_bytes(backends.load(_BACKEND))
    return Room(nbytes, settings.capacity_factor, settings.window_bytes, rows, needed)


def _rows(layer: LayerRouting, layout: str, tokens: int, slots: int) -> float:
    """Return the expected rows of the busiest rank, for `tokens` tokens of all ranks."""
    if layout == "batched":
        return tokens * layer.busiest_slot * slots
    return tokens * float((layer.spread.ranks if layout == "flat" else layer.spread.entries).max())
