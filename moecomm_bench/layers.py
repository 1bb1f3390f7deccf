"""Timed layers of one size: moecomm's in each form, their parts, and torch's, on several inputs in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moecomm.base.choices import Quantize
from moecomm.buffer import Buffer
from moecomm.fused import Fp8, kernels, pack_mxfp4, quantize_channels, quantize_rows, quantize_weights
from moecomm.fused.experts import apply_experts
from moecomm.fused.formats import format_of
from moecomm.ranks.settings import Settings
from moecomm.router import Model, random_routing
from moecomm_bench import other_experts, other_layers, replay
from moecomm_bench.case import Traffic
from moecomm_bench.clock import Call, Clock, Rotation
from moecomm_bench.four_bits import in_mxfp4
from moecomm_bench.layer_case import ModelsCase
from moecomm_bench.ours import ROWS_WIRE
from moecomm_bench.ranks import together
from moecomm_bench.singles import Singles
from moecomm_bench.torch_layer import TorchLayer, TorchRankLayer

# Variants of our layer, as results name them. FP8, MXFP4 and PACKED (MXFP4 beside FP8 rows) also name variants of its
# parts, and precede the others.
SEQUENTIAL, FUSED, FP8, MXFP4, PACKED = "sequential", "one launch", "fp8", "mxfp4", "packed mxfp4"
DEFAULT_WIRE = "bf16 wire"  # unfused, with combine's default wire; SEQUENTIAL has the same bits as FUSED
AS_CALLED = "default"  # `fused=None`: the form that the tuning table chooses
CHANNELS = {"fp8 by channel": kernels.FP8, "int8 by channel": torch.int8}  # variants, by the dtype of their weights
BY_RANK = "rows by rank"  # of torch's layer: a row for each (token, rank), not for each (token, expert)

Key = tuple[str, str, str]  # (who, what, variant)
_WITH_SINGLES = ("layer", "GEMMs")  # also timed alone, eager and sustained


class LayerRows(NamedTuple):
    """One dispatched input: its rows outside the window, their number by expert, and the handle."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    handle: Any


class Layers:
    """A Buffer, and the layers and parts of one size. Collective; a context manager.

    Attributes:
        inputs: arguments of our layer, without weights, that operations rotate among.
        traffic: rows between ranks, the mean over inputs.
        max_rows: rows that a dispatch makes room for; None: the Buffer's default, without knowledge of the routing.
    """

    def __init__(
        self,
        case: ModelsCase,
        model: Model,
        tokens: int,
        weights: dict[str, torch.Tensor],
        group: dist.ProcessGroup,
        transport: dist.ProcessGroup,
        device: torch.device,
        singles: Singles | None = None,
    ) -> None:
        self._case, self._model, self._tokens, self._group = case, model, tokens, group
        self._transport, self._weights, self._singles = transport, weights, singles
        self._opened: list[other_layers.DeepGemmLayer] = []
        generator = torch.Generator().manual_seed((case.seed * 1000 + group.rank()) * 1_000_003 + tokens)
        routing = [self._routing(index, generator) for index in range(case.inputs)]
        traffic = [Traffic.of(group, idx, model.num_experts) for idx, _ in routing]
        self.traffic = Traffic.mean(traffic)
        self.inputs: list[dict[str, Any]] = [
            {
                "x": torch.randn(tokens, model.hidden, generator=generator).to(device, torch.bfloat16),
                "topk_idx": idx.to(device),
                "topk_weights": topk_weights.to(device),
            }
            for idx, topk_weights in routing
        ]
        # Replayed routing may be skewed: room for the worst case, always enough, would take most of the memory.
        exact = max(1, *(int(found.entries.sum(dim=0).max()) for found in traffic))
        self.max_rows = exact if case.routing_file else None
        heap = window_bytes(case, model, tokens)
        self.buffer = Buffer(
            group,
            hidden=model.hidden,
            num_experts=model.num_experts,
            topk=model.topk,
            max_tokens=max(tokens, case.room),
            backend=case.backend,
            device=device,
            window_bytes=heap,
        )
        self._as_called = self.buffer.nbytes - heap + self.buffer.rounds.settings.default_heap()
        timing: dict[str, Any] = {"cold": False, "chain": case.chain_of(tokens), "replays": case.replays}
        self._clock = Clock(group, device, graph=case.mode == "graph", **timing)
        self._eager = Clock(group, device, graph=False, **timing)

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self._opened:
            layer.close()
        self.buffer.close()

    def rows(self) -> list[dict[str, Any]]:
        """Measure everything on this rank; returns rows with times by replay, or with the reason (`why`) for none."""
        made: dict[Key, Rotation] = {}
        failed = []
        for key, make in self.makers():
            calls, why = together(self._group, partial(self._tried, make))
            if why:
                failed.append({**self._about(key), "why": why})
            else:
                made[key] = Rotation(calls)
        meet = partial(self.buffer.dispatch, **self.inputs[0], max_rows=self.max_rows, sync=False)
        found: dict[Key, dict[str, Any]] = {key: self._about(key) | {"flops": self._flops(key[1])} for key in made}
        if self._case.others:
            true = other_layers.true_outputs(self._group, self.inputs[0], self._weights["w13"], self._weights["w2"])
            for key, row in found.items():
                if key[1] == "layer":
                    row["error"] = other_layers.error(made[key].calls[0], true, self._tokens)
        named: dict[str, Call] = {"\n".join(key): call for key, call in made.items()}
        slow: dict[str, Call] = {"\n".join(key): call for key, call in made.items() if key[1] in _WITH_SINGLES}
        burst, sustained = self._clock.burst_and_sustained(named, meet, slow, self._case.sustained_s)
        eager = self._eager.alternately(slow, meet) if self._singles and self._clock.graph else {}
        for key, row in found.items():
            name = "\n".join(key)
            row |= {"us": burst[name], "host_us": self._clock.host_us(made[key]) if key[1] == "layer" else None}
            row |= {"sustained_us": sustained[name]} if name in sustained else {}
            row |= {"eager_us": eager[name]} if name in eager else {}
            if self._singles and name in slow:
                row["alone_us"] = self._singles(made[key].calls, self._clock.graph)
        self.buffer.check()
        return [*found.values(), *failed]

    def makers(self) -> Iterator[tuple[Key, Callable[[], Sequence[Call]]]]:
        """Yield each operation: its key, and a function that returns its call on each input."""
        case = self._case
        w13, w2 = self._weights["w13"], self._weights["w2"]
        quantized: dict[str, tuple[Any, Any]] = {}
        if case.fp8:
            quantized[FP8] = quantize_weights(w13), quantize_weights(w2)
        if case.mxfp4:
            quantized[MXFP4] = in_mxfp4(w13), in_mxfp4(w2)
            quantized[PACKED] = pack_mxfp4(quantized[MXFP4][0]), pack_mxfp4(quantized[MXFP4][1])
        yield from self._layers("", w13, w2)
        if case.channels:
            for name, of_channels in CHANNELS.items():
                weights = quantize_channels(w13, of_channels), quantize_channels(w2, of_channels)
                yield from self._layers(name, *weights)
                if case.parts:
                    yield ("moecomm", "GEMMs", name), partial(self._channel_gemms, of_channels, *weights)
        for name in case.others:
            yield (name, "layer", _named(FP8, FUSED)), partial(self._deep_gemm_layer, *quantized[FP8])
        if not case.parts:
            for dtype, both in quantized.items():
                yield from self._layers(dtype, *both)
            return
        arrived = self._arrived()
        yield from self._parts("", w13, w2, arrived)
        for dtype, both in quantized.items():
            yield from self._layers(dtype, *both)
            yield from self._parts(dtype, *both, arrived if dtype == MXFP4 else self._arrived(quantize="fp8"))
        if case.peers:
            yield from self._others(w13, w2, arrived)

    def _layers(self, dtype: str, w13: Any, w2: Any) -> Iterator[tuple[Key, Callable[[], Sequence[Call]]]]:
        """Yield forms of our layer; `dtype` is FP8, one of CHANNELS, MXFP4 (never fused), PACKED, or empty."""
        forms: dict[str, dict[str, Any]] = {dtype or SEQUENTIAL: {"fused": False}}
        if self.buffer.device.type == "cuda" and dtype != MXFP4:
            forms[_named(dtype, FUSED)] = {"fused": True}
        if self._case.parts:
            forms[_named(dtype, DEFAULT_WIRE)] = {"fused": False, "wire": torch.bfloat16}
            forms[_named(dtype, AS_CALLED)] = {"fused": None}
        if self._case.rows_wire:
            forms |= {
                _named(variant, ROWS_WIRE): {**options, "wire": "rows"}
                for variant, options in forms.items()
                if "wire" not in options
            }
        for variant, options in forms.items():
            layer = partial(self.buffer.moe, w13=w13, w2=w2, max_rows=self.max_rows, **options)
            yield ("moecomm", "layer", variant), partial(self._on_each, layer)

    def _parts(
        self, dtype: str, w13: Any, w2: Any, arrived: list[LayerRows]
    ) -> Iterator[tuple[Key, Callable[[], Sequence[Call]]]]:
        """Yield the parts of our unfused layer; with weights in MXFP4, rows travel as with bfloat16 or with FP8."""
        options: dict[str, Any] = {"max_rows": self.max_rows, "quantize": "fp8" if dtype == FP8 else None}
        if dtype in ("", FP8):
            call = partial(self.buffer.dispatch, **options, sync=False)
            yield ("moecomm", "dispatch", dtype), partial(self._on_each, call)
        gemms = [_gemms(one, w13, w2) for one in arrived]
        yield ("moecomm", "GEMMs", dtype), lambda: gemms
        if not dtype:
            combine = self.buffer.combine
            ready = [partial(combine, call(), one.handle) for call, one in zip(gemms, arrived, strict=True)]
            yield ("moecomm", "combine", ""), lambda: ready
            if self._case.rows_wire:
                yield ("moecomm", "combine", ROWS_WIRE), lambda: [partial(call, wire="rows") for call in ready]

    def _others(
        self, w13: torch.Tensor, w2: torch.Tensor, arrived: list[LayerRows]
    ) -> Iterator[tuple[Key, Callable[[], Sequence[Call]]]]:
        """Yield torch's layers, and the GEMMs of torch and of other libraries."""
        by_expert = [TorchLayer(**given, w13=w13, w2=w2, group=self._transport) for given in self.inputs]
        by_rank = [TorchRankLayer(**given, w13=w13, w2=w2, group=self._transport) for given in self.inputs]
        yield ("torch", "layer", ""), lambda: [one.layer for one in by_expert]
        yield ("torch", "layer", BY_RANK), lambda: [one.layer for one in by_rank]
        both = list(zip(by_expert, arrived, strict=True))
        yield ("torch", "GEMMs", ""), lambda: [partial(layer.experts, one.rows) for layer, one in both]
        if self.buffer.device.type == "cuda":
            for name, make in other_experts.ways().items():

                def calls(make: Callable[..., Call] = make) -> Sequence[Call]:
                    return [make(one.rows, one.counts, w13, w2) for one in arrived]

                yield (name, "GEMMs", ""), calls

    def _deep_gemm_layer(self, w13: Fp8, w2: Fp8) -> Sequence[Call]:
        layer = other_layers.DeepGemmLayer(self._transport, self._model, self._tokens, w13, w2)
        self._opened.append(layer)
        return [layer.call(**given) for given in self.inputs]

    def _on_each(self, call: Callable[..., Any]) -> Sequence[Call]:
        return [partial(call, **given) for given in self.inputs]

    def _arrived(self, quantize: Quantize | None = None) -> list[LayerRows]:
        """Dispatch each input; its rows leave the window, so that there is room for the next."""
        found = []
        for given in self.inputs:
            routed: Any = self.buffer.dispatch(**given, max_rows=self.max_rows, quantize=quantize, sync=True)
            scales = None if routed.scales is None else routed.scales.clone()
            found.append(LayerRows(routed.x.clone(), scales, routed.tokens_per_expert.clone(), routed.handle))
        return found

    def _channel_gemms(self, dtype: torch.dtype, w13: Any, w2: Any) -> Sequence[Call]:
        """Return our GEMMs of rows that have one scale each, with the cast between them."""
        calls = []
        for one in self._arrived():
            rows, expected = quantize_rows(one.rows, dtype), max(1, len(one.rows) // len(w2.data))
            how: dict[str, Any] = {"scales": rows.scales, "dtype": torch.bfloat16, "expected_rows": expected}
            calls.append(partial(apply_experts, format_of(w2), rows.data, w13, w2, one.counts, **how))
        return calls

    def _routing(self, index: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        case, model = self._case, self._model
        if case.routing_file:
            return replay.rows(case.routing_file, self._tokens, index * case.ranks + self._group.rank())
        return random_routing(self._tokens, model.num_experts, model.topk, generator=generator)

    def _tried(self, make: Callable[[], Sequence[Call]]) -> Sequence[Call]:
        """Make and run calls once before the Clock, so that a failure does not leave other ranks waiting there."""
        calls = make()
        for call in calls:
            call()
        if self.buffer.device.type == "cuda":
            torch.cuda.synchronize()
        return calls

    def _about(self, key: Key) -> dict[str, Any]:
        who, what, variant = key
        settings = self.buffer.rounds.settings
        rows = settings.capacity_rows("expert") if self.max_rows is None else self.max_rows
        about = {"model": self._model.name, "tokens": self._tokens, "who": who, "what": what, "variant": variant}
        return about | {"max_rows": rows, "window_bytes": self._as_called, "opened_bytes": self.buffer.nbytes}

    def _flops(self, what: str) -> float:
        """Return the floating-point operations of this rank's experts, the mean over inputs."""
        rows = float(self.traffic.entries.sum(dim=0)[self._group.rank()])
        return 6 * rows * self._model.hidden * self._model.intermediate if what in ("layer", "GEMMs") else 0


def window_bytes(case: ModelsCase, model: Model, tokens: int) -> int:
    """Return the window bytes, for any number of ranks: room for all rows of four, and for two Buffers of a caller's.

    Graphs share the memory of their outputs, and eager rounds have memory of their own. A rank has about as many rows
    with any number of ranks.
    """
    experts, most = -(-model.num_experts // 4) * 4, max(tokens, case.room)
    sizes = Settings(4, model.hidden, experts, model.topk, most, torch.bfloat16, case.backend, None)
    return max(replace(sizes, capacity_factor=math.inf).default_heap(), 2 * sizes.default_heap())


def _named(dtype: str, variant: str) -> str:
    return f"{dtype}, {variant}" if dtype else variant


def _gemms(one: LayerRows, w13: Any, w2: Any) -> Call:
    """Return our two GEMMs on the rows of one input, in the dtype of the weights."""
    how: dict[str, Any] = {"scales": one.scales, "dtype": torch.bfloat16}
    how["expected_rows"] = max(1, len(one.rows) // len(one.counts))
    return partial(apply_experts, format_of(w2), one.rows, w13, w2, one.counts, **how)
