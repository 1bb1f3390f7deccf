"""Complete expert layers: ours, torch's on the same input in the same run, and the GEMMs alone, alternating."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.bench import other_experts, replay
from moecomm.bench.case import Traffic
from moecomm.bench.clock import Clock, percentiles
from moecomm.bench.exchange import nccl_group
from moecomm.bench.ranks import device_of, on_ranks, progress, together
from moecomm.bench.torch_layer import TorchLayer
from moecomm.buffer import Buffer
from moecomm.core.choices import BackendName
from moecomm.core.settings import Settings
from moecomm.errors import BadInput
from moecomm.fused import Fp8, quantize_weights
from moecomm.fused.fp8_experts import apply_fp8_experts
from moecomm.fused.layer import apply_experts
from moecomm.router import Model, random_routing

# Variants of our layer, as results name them. FP8 also names variants of its parts, and precedes FUSED.
SEQUENTIAL, FUSED, FP8 = "sequential", "one launch", "fp8"
_CHAINED_TOKENS, _MOST_CHAINED = 16384, 20

Call = Callable[[], Any]
Key = tuple[str, str, str]  # (who, what, variant)


@dataclass(frozen=True)
class Case:
    """One run over models and sizes; rows are bfloat16, routing is random or replayed."""

    models: list[Model]
    tokens: list[int]  # of each rank
    ranks: int
    backend: BackendName
    mode: str  # graph or eager
    replays: int = 10
    peers: bool = True
    parts: bool = True  # also dispatch, GEMMs and combine, each alone
    fp8: bool = False  # also our layer with weights in FP8
    room: int = 0  # least max_tokens of a Buffer; 0: the measured size
    seed: int = 0
    routing_file: str = ""  # of moecomm.routing, to be replayed; empty: the routing is drawn

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        if not self.tokens or min(self.tokens) < 1 or self.replays < 1:
            raise BadInput("tokens, replays", (self.tokens, self.replays), "at least 1 each")
        if self.room < 0:
            raise BadInput("room", self.room, "at least 1, or 0 for as many as are measured")
        for model in self.models:
            if self.ranks < 1 or model.num_experts % self.ranks:
                raise BadInput("ranks", self.ranks, f"a divisor of {model.num_experts} experts")
            if self.routing_file:
                replay.check(self.routing_file, model.num_experts, model.topk, model.name)
            most = max(*self.tokens, self.room)
            Settings(self.ranks, model.hidden, model.num_experts, model.topk, most, torch.bfloat16, "", None).check()
            sizes, units = (model.hidden, model.intermediate), (16, 32) if self.fp8 else (8, 8)
            if any(size % unit for size, unit in zip(sizes, units, strict=True)):
                raise BadInput("hidden, intermediate", sizes, f"multiples of {units[0]} and {units[1]}")
        if self.mode not in ("graph", "eager") or (self.mode == "graph" and self.backend == "host"):
            raise BadInput("mode", self.mode, "eager on CPUs; graph or eager on GPUs")

    def chain_of(self, tokens: int) -> int:
        """Return how many layers are timed together: fewer of the larger ones, one on CPUs."""
        return 1 if self.backend == "host" else max(2, min(_MOST_CHAINED, _CHAINED_TOKENS // tokens))


def run(case: Case) -> dict[str, Any] | None:
    """Measure a case on all ranks; None in a process that has nothing to report.

    Returns {benchmark, case, backend, rows}: see `merge`. Raises BadInput, RanksFailed.
    """
    case.check()
    by_rank = on_ranks("moecomm.bench.moe:run_rank", asdict(case), case.ranks)
    return None if by_rank is None else merge(case, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    case = Case(**{**job, "models": [Model(**model) for model in job["models"]]})
    device = device_of(group, case.backend)
    found: dict[str, Any] = {"rows": []}
    transport = nccl_group() if case.peers and device.type == "cuda" else group
    with progress(group, len(case.models) * len(case.tokens)) as step:
        for model in case.models:
            weights = _weights(case, model, group.rank(), device)
            for tokens in case.tokens:
                step(f"{model.name or 'layer'}, {tokens} tokens")
                with Layers(case, model, tokens, weights, group, transport, device) as layers:
                    found["backend"] = layers.buffer.backend
                    found["rows"] += layers.rows()
    return found


def _weights(case: Case, model: Model, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + rank)
    local, inner = model.num_experts // case.ranks, model.intermediate

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    w13 = drawn(local, 2 * inner, model.hidden)
    return {"w13": w13, "w2": drawn(local, model.hidden, inner)}


def _window_bytes(case: Case, model: Model, tokens: int) -> int:
    """Return the window bytes, for any number of ranks: room for all rows of four.

    Graphs of all variants keep their outputs at the same time, and a rank has about as many rows with any number of
    ranks.
    """
    experts, most = -(-model.num_experts // 4) * 4, max(tokens, case.room)
    sizes = Settings(4, model.hidden, experts, model.topk, most, torch.bfloat16, case.backend, None)
    return replace(sizes, capacity_factor=math.inf).default_heap()


class Layers:
    """A Buffer, and the layers and parts of one size. Collective; a context manager."""

    def __init__(
        self,
        case: Case,
        model: Model,
        tokens: int,
        weights: dict[str, torch.Tensor],
        group: dist.ProcessGroup,
        transport: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._case, self._model, self._tokens, self._group = case, model, tokens, group
        self._transport, self._weights = transport, weights
        generator = torch.Generator().manual_seed((case.seed * 1000 + group.rank()) * 1_000_003 + tokens)
        if case.routing_file:
            topk_idx, topk_weights = replay.rows(case.routing_file, tokens, group.rank())
        else:
            topk_idx, topk_weights = random_routing(tokens, model.num_experts, model.topk, generator=generator)
        self._traffic = Traffic.of(group, topk_idx, model.num_experts)
        x = torch.randn(tokens, model.hidden, generator=generator).to(device, torch.bfloat16)
        self._routing: dict[str, Any] = {
            "x": x,
            "topk_idx": topk_idx.to(device),
            "topk_weights": topk_weights.to(device),
        }
        self.buffer = Buffer(
            group,
            hidden=model.hidden,
            num_experts=model.num_experts,
            topk=model.topk,
            max_tokens=max(tokens, case.room),
            backend=case.backend,
            device=device,
            window_bytes=_window_bytes(case, model, tokens),
        )
        self._clock = Clock(
            group,
            device,
            graph=case.mode == "graph",
            cold=False,
            chain=case.chain_of(tokens),
            replays=case.replays,
        )

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *error: object) -> None:
        self.buffer.close()

    def rows(self) -> list[dict[str, Any]]:
        """Measure everything on this rank; returns rows with `us` by replay, or with `why` there are none."""
        # Room for exactly the rows that arrive; the worst case would take most of the memory.
        self._room = max(1, int(self._traffic.entries.sum(dim=0).max()))
        arrived = self.buffer.dispatch(**self._routing, max_rows=self._room, sync=True)
        calls: dict[Key, Call] = {}
        failed = []
        for key, make in self._makers(arrived):
            call, why = together(self._group, partial(self._tried, make))
            if why:
                failed.append({**self._about(key), "why": why})
            else:
                calls[key] = call
        meet = partial(self.buffer.dispatch, **self._routing, max_rows=self._room, sync=False)
        named = {"\n".join(key): call for key, call in calls.items()}
        us = self._clock.alternately(named, meet)
        self.buffer.check()
        host = {key: self._clock.host_us(call) for key, call in calls.items() if key[1] == "layer"}
        timed = [
            {**self._about(key), "us": us["\n".join(key)], "host_us": host.get(key), "flops": self._flops(key[1])}
            for key in calls
        ]
        return timed + failed

    def _makers(self, arrived: Any) -> Iterator[tuple[Key, Callable[[], Call]]]:
        ours: dict[str, Any] = {"max_rows": self._room}
        w13, w2 = self._weights["w13"], self._weights["w2"]
        layer = partial(self.buffer.moe, **self._routing, w13=w13, w2=w2, **ours)
        yield ("moecomm", "layer", SEQUENTIAL), lambda: partial(layer, fused=False)
        if self.buffer.device.type == "cuda":
            yield ("moecomm", "layer", FUSED), lambda: partial(layer, fused=True)
        if self._case.fp8 and not self._case.parts:
            yield from self._fp8_layers(*self._fp8_weights(), ours)
        if not self._case.parts:
            return
        yield ("moecomm", "dispatch", ""), lambda: partial(self.buffer.dispatch, **self._routing, **ours, sync=False)
        rows, counts = arrived.x, arrived.tokens_per_expert
        expected = max(1, len(rows) // len(w2))
        gemms = partial(apply_experts, rows, w13, w2, tokens_per_expert=counts, expected_rows=expected)
        yield ("moecomm", "GEMMs", ""), lambda: gemms
        y = gemms()
        yield ("moecomm", "combine", ""), lambda: partial(self.buffer.combine, y, arrived.handle)
        if self._case.fp8:
            yield from self._fp8_makers(ours)
        if not self._case.peers:
            return
        routing = self._routing
        other = TorchLayer(routing["x"], routing["topk_idx"], routing["topk_weights"], w13, w2, self._transport)
        yield ("torch", "layer", ""), lambda: other.layer
        yield ("torch", "GEMMs", ""), lambda: partial(other.experts, rows)
        if rows.is_cuda:
            for name, make in other_experts.ways().items():
                yield (name, "GEMMs", ""), partial(make, rows, counts, w13, w2)

    def _fp8_weights(self) -> tuple[Fp8, Fp8]:
        return quantize_weights(self._weights["w13"]), quantize_weights(self._weights["w2"])

    def _fp8_layers(self, w13: Fp8, w2: Fp8, ours: dict[str, Any]) -> Iterator[tuple[Key, Callable[[], Call]]]:
        layer = partial(self.buffer.moe, **self._routing, w13=w13, w2=w2, **ours)
        yield ("moecomm", "layer", FP8), lambda: partial(layer, fused=False)
        if self.buffer.device.type == "cuda":
            yield ("moecomm", "layer", f"{FP8}, {FUSED}"), lambda: partial(layer, fused=True)

    def _fp8_makers(self, ours: dict[str, Any]) -> Iterator[tuple[Key, Callable[[], Call]]]:
        w13, w2 = self._fp8_weights()
        yield from self._fp8_layers(w13, w2, ours)
        dispatch = partial(self.buffer.dispatch, **self._routing, **ours, quantize="fp8")
        yield ("moecomm", "dispatch", FP8), lambda: partial(dispatch, sync=False)
        arrived: Any = dispatch(sync=True)
        rows, counts = Fp8(arrived.x, arrived.scales), arrived.tokens_per_expert
        expected = max(1, len(arrived.x) // len(w2.data))
        gemms = partial(apply_fp8_experts, rows, w13, w2, counts, torch.bfloat16, expected_rows=expected)
        yield ("moecomm", "GEMMs", FP8), lambda: gemms

    def _tried(self, make: Callable[[], Call]) -> Call:
        """Make and run a call once before the Clock, so that a failure does not leave other ranks waiting there."""
        call = make()
        call()
        if self.buffer.device.type == "cuda":
            torch.cuda.synchronize()
        return call

    def _about(self, key: Key) -> dict[str, Any]:
        who, what, variant = key
        return {"model": self._model.name, "tokens": self._tokens, "who": who, "what": what, "variant": variant} | {
            "window_bytes": self.buffer.nbytes
        }

    def _flops(self, what: str) -> int:
        """Return the floating-point operations of this rank's experts."""
        rows = int(self._traffic.entries.sum(dim=0)[self._group.rank()])
        return 6 * rows * self._model.hidden * self._model.intermediate if what in ("layer", "GEMMs") else 0


def merge(case: Case, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {model, tokens, who, what, variant, window_bytes, us: {p50, p90, p99}, host_us, tflops, of_gemms,
    of_torch}, or has `why` in place of figures.

    - `us`: times of the slowest rank.
    - `tflops`: per rank, on average.
    - `of_gemms`: time of a layer / time of our GEMMs alone, in FP8 of our FP8 GEMMs.
    - `of_torch`: torch's time for the same / this time; not for FP8.
    """
    rows = [_merged(parts) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    for row in rows:
        _compare(row, rows)
    return {"benchmark": "moe", "case": replay.shown(case), "backend": by_rank[0]["backend"], "rows": rows}


def _merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    if "why" in row:
        return row
    us = row["us"] = percentiles([part["us"] for part in parts])
    flops = statistics.mean(part["flops"] for part in parts)
    del row["flops"]
    row["tflops"] = round(flops / us["p50"] / 1e6, 2) if flops else None
    host = [part["host_us"] for part in parts if part["host_us"] is not None]
    return row | {"host_us": round(max(host), 2) if host else None}


def _compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add of_gemms and of_torch where the rows to compare with exist."""

    def p50(who: str, what: str, variant: str) -> float | None:
        place = (row["model"], row["tokens"], who, what, variant)
        keys = ("model", "tokens", "who", "what", "variant")
        found = [r["us"]["p50"] for r in rows if "us" in r and tuple(r[key] for key in keys) == place]
        return float(found[0]) if found else None

    if "us" not in row or row["what"] not in ("layer", "GEMMs"):
        return
    fp8 = row["variant"].startswith(FP8)
    mine, gemms = row["us"]["p50"], p50("moecomm", "GEMMs", FP8 if fp8 else "")
    torchs = None if fp8 else p50("torch", row["what"], "")
    if row["what"] == "layer" and gemms:
        row["of_gemms"] = round(mine / gemms, 4)
    if row["who"] != "torch" and torchs:
        row["of_torch"] = round(torchs / mine, 4)
