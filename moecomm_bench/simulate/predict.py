"""Predictions for each number of domains and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from moecomm.backends import lsa
from moecomm.base.protocol import LAYOUTS
from moecomm.errors import BadInput
from moecomm_bench import replay
from moecomm_bench.case import PAYLOADS
from moecomm_bench.ours import BF16_WIRE, FP32_WIRE, IN_WINDOW
from moecomm_bench.simulate.domain import MOST_FEW, Operation
from moecomm_bench.simulate.layer import HBM_GBS, gemm_us, layer
from moecomm_bench.simulate.memory import memory
from moecomm_bench.simulate.model import AUTO, Cost, Machine, Rows, cost
from moecomm_bench.simulate.nic import SOURCES
from moecomm_bench.simulate.routing import DrawnGate, Spread, recorded_spread, spread
from moecomm_bench.simulate.rows import bytes_of, head_bytes, lines_of, slow_bytes_of

_MOST_GPUS = 1 << 16


@dataclass(frozen=True)
class SimulatedCase:
    """The case to predict; `hidden` and `intermediate` are columns of a token and of an expert.

    A `gemm_us` of 0 means the roofline, and a `gemm_tflops` of 0 the measured speed. `gpus` replaces `domains` with
    numbers of GPUs: fewer than `ranks` are one smaller domain. With `layers` rows have the memory of a GPU.
    """

    model: str
    hidden: int
    intermediate: int
    gate: DrawnGate
    domains: list[int]
    ranks: int  # of a domain
    tokens: list[int]  # of a rank
    layout: str = "flat"
    payload: str = "fp8"
    wire: str = "bf16"  # of reduced rows in combine; flat: between domains.  fp32: exact, as Buffer's wire="exact"
    skew: float = 0.0
    algorithm: str = AUTO
    gemm_us: float = 0.0
    gemm_tflops: float = 0.0
    hbm_gbs: float = HBM_GBS
    parts: int = 2
    routing_file: str = ""  # of moecomm.routing, in the place of the gate's expected routing
    gpus: list[int] = field(default_factory=list)
    layers: int = 0

    def check(self) -> None:
        """Raise BadInput if the case is out of range."""
        if not self.domains or not self.tokens:
            raise BadInput("domains, tokens", (self.domains, self.tokens), "at least one number each")
        most = max(self.gpus, default=max(self.domains) * self.ranks)
        if most > _MOST_GPUS or self.gate.experts > _MOST_GPUS:
            raise BadInput(
                "domains, ranks, experts", (most, self.gate.experts), f"at most {_MOST_GPUS} GPUs, or experts"
            )
        for gpus in self.gpus:
            if gpus < 1 or (gpus > self.ranks and gpus % self.ranks):
                raise BadInput("gpus", gpus, f"at least 1; beyond a domain, a multiple of its {self.ranks}")
        if self.routing_file and self.skew:
            raise BadInput("skew", self.skew, "no skew beside a recorded routing")
        if self.routing_file:
            replay.check(self.routing_file, self.gate.experts, self.gate.topk, self.model)
        if self.layout not in LAYOUTS:
            raise BadInput("layout", repr(self.layout), f"one of {', '.join(LAYOUTS)}")
        if self.payload not in PAYLOADS:
            raise BadInput("payload", repr(self.payload), f"one of {', '.join(PAYLOADS)}")
        if self.wire not in ("fp32", "bf16"):
            raise BadInput("wire", repr(self.wire), "fp32 or bf16")
        if self.hidden < 1 or not 0 <= self.gemm_us < inf or self.gemm_tflops < 0:
            raise BadInput(
                "hidden, gemm_us, gemm_tflops", (self.hidden, self.gemm_us, self.gemm_tflops), "1, 0, 0 or more"
            )

    @property
    def routing(self) -> str:
        """The routing, in words."""
        gate = self.gate
        if self.routing_file:
            return f"top-{gate.topk} of {gate.experts} experts{replay.said(replay.shown(self))}"
        drawn = f"top-{gate.topk} of {gate.experts} experts, all equally likely"
        grouped = f", from {gate.topk_groups} of {gate.groups} groups" if gate.groups > 1 else ""
        skewed = f"; {self.skew:.0%} of the tokens want rank 0 first" if self.skew else ""
        return f"{drawn}{grouped}{skewed}"

    def spread(self, domains: int) -> Spread:
        """Return the expected routing of a token over so many domains."""
        if self.routing_file:
            return recorded_spread(replay.recorded(self.routing_file), domains, self.ranks)
        return spread(self.gate, domains, self.ranks, self.skew)

    def each_size(self) -> Iterator[SimulatedCase]:
        """Yield the case for each number of domains or GPUs."""
        sizes = [(max(1, gpus // self.ranks), min(gpus, self.ranks)) for gpus in self.gpus]
        for domains, ranks in sizes or [(domains, self.ranks) for domains in self.domains]:
            yield replace(self, domains=[domains], ranks=ranks, gpus=[])

    @property
    def operations(self) -> tuple[Operation, Operation]:
        """Dispatch and combine, as operations of the model."""
        variant = IN_WINDOW if self.layout == "flat" else FP32_WIRE if self.wire == "fp32" else BF16_WIRE
        return Operation("dispatch", self.layout), Operation("combine", self.layout, variant)


def predict(asked: SimulatedCase, machine: Machine) -> dict[str, Any]:
    """Return {benchmark, prediction, case, inputs, rows}; `row` describes a row. Raises BadInput."""
    asked.check()
    return {
        "benchmark": "simulate",
        "prediction": "by a model, not measured",
        "case": replay.shown(asked),
        "inputs": {
            "domain": machine.domain.name,
            "nic": asdict(machine.nic),
            "nic_defaults_from": SOURCES,
            "chunk_tokens": machine.chunk_tokens,
            "num_sms": machine.num_sms,
            "routing": asked.routing,
            "gemm_tflops": asked.gemm_tflops or machine.domain.gemm_tflops,
            "gemm_kept_beside_rounds": machine.domain.gemm_kept,
        },
        "rows": list(_rows(asked, machine)),
    }


def _rows(asked: SimulatedCase, machine: Machine) -> Iterator[dict[str, Any]]:
    for one in asked.each_size():
        routed = one.spread(*one.domains)
        for tokens in asked.tokens:
            about = {"memory": memory(one, tokens)} if asked.layers else {}
            yield row(one, machine, routed, tokens) | about


def _most_direct(hidden: int) -> int:
    """Return the tokens that a multi-domain Buffer has room to put directly, with float32 reduced rows."""
    return lsa.direct_bytes(2, MOST_FEW, 4 * hidden) // (4 * hidden)


def _cost(operation: Operation, asked: SimulatedCase, machine: Machine, routed: Spread, tokens: int) -> Cost:
    single = routed.single if len(routed.domains) == 1 else 0.0  # over several domains all sums are float32
    dispatches = operation.what == "dispatch"
    rows = Rows(
        bytes_of(operation, asked.payload, asked.hidden, single),
        lines_of(operation, asked.payload, asked.hidden, asked.gate.topk, single),
        slow_bytes_of(operation, asked.payload, asked.hidden, asked.wire),
        head_bytes(asked.gate.topk, asked.ranks) if dispatches else 0,
        2 * asked.hidden,
        joined=not dispatches or asked.payload == "bf16",
    )
    most = _most_direct(asked.hidden)
    return cost(operation, routed, tokens, rows, machine, algorithm=asked.algorithm, most_direct=most)


def row(asked: SimulatedCase, machine: Machine, routed: Spread, tokens: int) -> dict[str, Any]:
    """Return one row: domains, ranks, gpus, tokens, expected ranks and domains of a token, dispatch, combine and layer.

    Dispatch and combine have the fields of `Cost` and `bound`; the layer has those of `Layer`. Times are in
    microseconds.
    """
    dispatch, combine = (_cost(operation, asked, machine, routed, tokens) for operation in asked.operations)
    experts_us = asked.gemm_us or gemm_us(
        machine.domain,
        routed,
        asked.gate.experts,
        tokens,
        asked.hidden,
        asked.intermediate,
        tflops=asked.gemm_tflops or None,
        hbm_gbs=asked.hbm_gbs,
    )
    whole = layer(machine.domain, dispatch.us, combine.us, experts_us, asked.parts)
    return {
        "domains": len(routed.domains),
        "ranks": asked.ranks,
        "gpus": len(routed.ranks),
        "tokens": tokens,
        "ranks_wanted": round(float(routed.ranks.sum()), 4),
        "domains_wanted": round(float(routed.domains.sum()), 4),
        "dispatch": {**_rounded(asdict(dispatch)), "bound": dispatch.bound},
        "combine": {**_rounded(asdict(combine)), "bound": combine.bound},
        "layer": _rounded(asdict(whole)),
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
