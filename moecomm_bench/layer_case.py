"""The case of a benchmark of expert layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moecomm.base.choices import BackendName
from moecomm.errors import BadInput
from moecomm.ranks.settings import Settings
from moecomm.router import Model
from moecomm_bench import other_layers, replay

_CHAINED_TOKENS, _LEAST_CHAINED, _MOST_CHAINED = 16384, 4, 20


@dataclass(frozen=True)
class ModelsCase:
    """One run over models and sizes; rows are bfloat16, routing is random or replayed."""

    models: list[Model]
    tokens: list[int]  # of each rank
    ranks: int
    backend: BackendName
    mode: str  # graph or eager
    replays: int = 10
    peers: bool = True
    parts: bool = True  # also dispatch, GEMMs and combine, each alone, and more forms of the layer
    fp8: bool = False  # also our layer with weights in FP8
    mxfp4: bool = False  # also with weights in MXFP4, beside bfloat16 rows and, packed, beside FP8 rows
    rows_wire: bool = False  # also our layer and combine whose rows return unsummed
    channels: bool = False  # also our layer with weights in FP8 and INT8 that have scales of channels
    room: int = 0  # least max_tokens of a Buffer; 0: the measured size
    seed: int = 0
    routing_file: str = ""  # of moecomm.routing, to be replayed; empty: the routing is drawn
    inputs: int = 4  # number of inputs, each with its own routing; operations rotate among them
    singles: int = 0  # single calls, and eager calls beside those in a graph; 0: neither
    sustained_s: float = 0.0  # seconds of a run without a pause; 0: none is measured
    others: list[str] = field(default_factory=list)  # of other_layers.LIBRARIES; layers then have errors

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        if not self.tokens or min(self.tokens) < 1 or self.replays < 1:
            raise BadInput("tokens, replays", (self.tokens, self.replays), "at least 1 each")
        if self.inputs < 1 or self.singles < 0 or self.sustained_s < 0:
            got = (self.inputs, self.singles, self.sustained_s)
            raise BadInput("inputs, singles, sustained_s", got, "1 or more; 0 or more; 0 or more")
        if set(self.others) - set(other_layers.LIBRARIES):
            raise BadInput("others", ",".join(self.others), f"some of {', '.join(other_layers.LIBRARIES)}")
        if self.others and not self.fp8:
            raise BadInput("others", ",".join(self.others), "with FP8 weights, of which these layers are: --fp8")
        if self.room < 0:
            raise BadInput("room", self.room, "at least 1, or 0 for as many as are measured")
        for model in self.models:
            if self.ranks < 1 or model.num_experts % self.ranks:
                raise BadInput("ranks", self.ranks, f"a divisor of {model.num_experts} experts")
            if self.routing_file:
                replay.check(self.routing_file, model.num_experts, model.topk, model.name)
            most = max(*self.tokens, self.room)
            Settings(self.ranks, model.hidden, model.num_experts, model.topk, most, torch.bfloat16, "", None).check()
            sizes, units = (model.hidden, model.intermediate), (8, 8)
            if self.fp8 or self.channels:
                units = (16, 32 if self.fp8 else 16)
            if self.mxfp4:
                units = 32, 32  # values that share an exponent
            if any(size % unit for size, unit in zip(sizes, units, strict=True)):
                raise BadInput("hidden, intermediate", sizes, f"multiples of {units[0]} and {units[1]}")
        if self.mode not in ("graph", "eager") or (self.mode == "graph" and self.backend == "host"):
            raise BadInput("mode", self.mode, "eager on CPUs; graph or eager on GPUs")

    def chain_of(self, tokens: int) -> int:
        """Return how many layers are timed together: fewer of the larger ones, one on CPUs."""
        return 1 if self.backend == "host" else max(_LEAST_CHAINED, min(_MOST_CHAINED, _CHAINED_TOKENS // tokens))
