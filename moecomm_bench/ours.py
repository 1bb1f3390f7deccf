"""moecomm's own timed operations: dispatch, combine, and pairs of both."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from moecomm import _native
from moecomm.base.choices import CombineWire
from moecomm.buffer import Buffer
from moecomm.dispatch.routed import Handle
from moecomm.errors import BadInput
from moecomm.gpu import quantize_rows
from moecomm.ranks.settings import Settings
from moecomm.testing.prepare import prepare_combine, prepare_dispatch
from moecomm_bench import overlap, stored
from moecomm_bench.case import FORMATS, GIVEN, RoundsCase, Traffic
from moecomm_bench.clock import Call, Clock, Rotation
from moecomm_bench.singles import Singles

IN_WINDOW, OUTSIDE = "y in the window", "y outside"  # variants of combine with flat rows
FP32_WIRE, BF16_WIRE = "fp32 wire", "bf16 wire"  # variants of combine in the other layouts
FP8_WIRE, INT8_WIRE = "fp8 wire", "int8 wire"  # of every layout
ROWS_WIRE = "rows wire"  # of the other layouts: no sums; y is in the window
_QUANTIZE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantize": "fp8"},
    "fp8-column": {"quantize": "fp8", "scale_layout": "column"},
    "fp8-ue8m0": {"quantize": "fp8", "scale_format": "ue8m0"},
    "fp8-ue8m0-column": {"quantize": "fp8", "scale_format": "ue8m0", "scale_layout": "column"},
    **{name: {"quantize": name} for name in FORMATS},
}
_OF_ALL = {"fp8_tensor": 0.01, "nvfp4": 400.0}  # x_global_scale


@dataclass(frozen=True)
class TimedOperation:
    """A timed operation.

    Attributes:
        what: "dispatch", "combine" or "pair": a dispatch, then a combine of the rows that arrived. After a dispatch in
            fp8 the rows of the same tokens in bf16 are combined, as experts would have left them.
        layout: layout of dispatch.
        payload: payload of dispatch, else empty.
        variant: variant of combine, else empty.
        sms: blocks; 0: from the tuning table.
    """

    what: str
    layout: str
    payload: str
    variant: str
    sms: int

    @property
    def label(self) -> str:
        """Text for the progress bar."""
        return " ".join(filter(None, ("moecomm", self.what, self.layout, self.payload, self.variant)))


def operations(case: RoundsCase) -> list[TimedOperation]:
    """Return all operations of a case at one size, grouped by layout."""
    found = []
    for layout in case.layouts:
        variants = [IN_WINDOW, OUTSIDE] if layout == "flat" else [FP32_WIRE, BF16_WIRE]
        variants += [FP8_WIRE] * case.fp8_wire + [INT8_WIRE] * case.int8_wire
        variants += [ROWS_WIRE] * (case.rows_wire and layout != "flat")
        for sms in case.sms:
            found += [TimedOperation("dispatch", layout, payload, "", sms) for payload in case.payloads]
            found += [TimedOperation("combine", layout, "", variant, sms) for variant in variants]
            if case.pairs:
                found += [TimedOperation("pair", layout, payload, variants[0], sms) for payload in case.payloads]
    return found


@dataclass(frozen=True)
class Input:
    """Tokens of this rank and their routing, on its device."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def cast_before(x: torch.Tensor, payload: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of a payload and their scales: see formats.quantize(). Its name may lack GIVEN."""
    name = payload.removesuffix(GIVEN)
    return quantize_rows.cast(x, name, global_scale=_OF_ALL.get(name))


class Ours:
    """A Buffer for one size, and its timed operations on several inputs in turn. Collective; a context manager.

    Dispatch makes room for as many rows as a caller can know: those of the Buffer's default, or the worst case where
    the routing is skewed.

    Attributes:
        tokens: of each rank, in each input.
        inputs: those that operations rotate among.
        traffic: rows between ranks, the mean over inputs.
        busiest: rows over the busiest link of an input, the mean over inputs.
    """

    def __init__(
        self,
        case: RoundsCase,
        group: dist.ProcessGroup,
        device: torch.device,
        tokens: int,
        singles: Singles | None = None,
    ) -> None:
        self._case, self.tokens, self._singles = case, tokens, singles
        routing = [case.routing(tokens, group.rank(), index) for index in range(case.inputs)]
        traffic = [Traffic.of(group, idx, case.experts, case.domain_ranks) for idx, _ in routing]
        self.traffic, self.busiest = Traffic.mean(traffic), statistics.mean(found.busiest() for found in traffic)
        generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + group.rank())
        self.inputs = [
            Input(
                torch.randn(tokens, case.hidden, generator=generator, device=device).to(torch.bfloat16),
                idx.to(device),
                weights.to(device),
            )
            for idx, weights in routing
        ]
        factor = math.inf if case.skew or case.routing_file else None
        sizes = (case.ranks, case.hidden, case.experts, case.topk, tokens, torch.bfloat16, case.backend, None)
        settings = Settings(*sizes, domain_ranks=case.domain_ranks or None, capacity_factor=factor)
        self._extra = _extra_bytes(settings, case.inputs)
        self.buffer = Buffer(
            group,
            hidden=case.hidden,
            num_experts=case.experts,
            topk=case.topk,
            max_tokens=tokens,
            backend=case.backend,
            device=device,
            domain_ranks=case.domain_ranks or None,
            capacity_factor=factor,
            window_bytes=settings.default_heap() + self._extra,
        )
        timing: dict[str, Any] = {"cold": case.cold, "chain": case.chain_of(tokens), "replays": case.replays}
        self.clock = Clock(group, device, graph=case.mode == "graph", **timing)
        self._eager = Clock(group, device, graph=False, **timing)
        # True if rows go to other domains without a forwarder; unused with one domain.
        self.direct = _native.goes_direct(self.buffer.rounds.session.context.shape, tokens)
        self._layout = ""
        self._handles: list[Handle] = []
        self._y: dict[str, list[torch.Tensor]] = {}

    def __enter__(self) -> Ours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._y, self._handles = {}, []
        self.buffer.close()

    def memory(self) -> dict[str, Any]:
        """Return the bytes of this rank's window: as a caller opens it, those that are not for outputs, as opened here.

        A caller's window lacks the rows of all inputs but one, which combine rotates among.
        """
        layout, window = self._case.layouts[0], self.buffer.nbytes
        beyond = window - self.buffer.rounds.memory.nbytes
        sizes = {"window": window - self._extra, "beyond_outputs": beyond, "opened": window}
        return {"tokens": self.tokens, "layout": layout, **sizes}

    def windows(self) -> dict[str, int]:
        """Return the bytes of this rank's window, for a row: as a caller opens it, and as opened here."""
        memory = self.memory()
        return {"window_bytes": memory["window"], "opened_bytes": memory["opened"]}

    def row(self, op: TimedOperation, *, host: bool = True) -> dict[str, Any]:
        """Measure an operation on this rank; returns its row, or one with `why` it has no figures.

        `us` is by replay, bytes are of all ranks; with `host` the row also has `host_us`. `alone_us` has single calls,
        `eager_us` calls one by one where `us` has those of a graph; both only if the case asks for single calls.
        """
        row: dict[str, Any] = {"who": "moecomm", "tokens": self.tokens, "sms_asked": op.sms}
        row |= {"what": op.what, "layout": op.layout, "payload": op.payload, "variant": op.variant}
        try:
            call, parts = self.call(op), 2 if op.what == "pair" else 1
            row |= {"straight": self.direct} | self._launched(op) | self._bytes(op)
            row |= {"us": self.clock(call, parts=parts), "host_us": self.clock.host_us(call) if host else None}
            if self._singles is not None:
                if self.clock.graph:
                    row["eager_us"] = self._eager(call, parts=parts)
                row["alone_us"] = self._singles(self.call(op, flush=False).calls, self.clock.graph)
            self.buffer.check()
        except BadInput as error:  # no room in the window, on all ranks alike
            row["why"] = str(error)
        return row

    def call(self, op: TimedOperation, *, flush: bool = True) -> Rotation:
        """Return the operation as a caller would write it, on one input after the other.

        With `flush`, a pair flushes the caches between its parts if the clock is cold.
        """
        self._use(op.layout)
        calls: list[Call]
        if op.what == "dispatch":
            calls = [partial(self.buffer.dispatch, **given) for given in self.dispatches(op)]
        elif op.what == "combine":
            calls = [partial(self.buffer.combine, **given) for given in self._combines(op)]
        else:
            calls = self._pairs(op, self.clock.flush if flush else _nothing)
        return Rotation(calls)

    def _use(self, layout: str) -> None:
        if self._layout != layout:  # frees the window memory of the earlier layout
            self._layout, self._handles, self._y = layout, [], {}

    def _pairs(self, op: TimedOperation, between: Call) -> list[Call]:
        options: dict[str, Any] = {"wire": _wire(op.variant), "num_sms": op.sms or None}
        dispatches = self.dispatches(op)
        rows = self.rows(op) if op.payload != "bf16" else [None] * len(dispatches)

        def pair(given: dict[str, Any], y: torch.Tensor | None) -> None:
            arrived = self.buffer.dispatch(**given)
            between()
            self.buffer.combine(arrived.x if y is None else y, arrived.handle, **options)

        return [partial(pair, given, y) for given, y in zip(dispatches, rows, strict=True)]

    def halves(self, op: TimedOperation, us: float) -> dict[str, list[float]]:
        """Time the halves of a dispatch that takes `us` microseconds: see overlap.halves."""
        return overlap.halves(self.clock, self.buffer, self.dispatches(op)[0], us)

    def dispatches(self, op: TimedOperation) -> list[dict[str, Any]]:
        """Return the arguments of dispatch for each input."""
        options: dict[str, Any] = {"layout": op.layout, "sync": False, "num_sms": op.sms or None}
        found = []
        for given in self.inputs:
            routing = {"topk_idx": given.topk_idx, "topk_weights": given.topk_weights}
            if not op.payload.endswith(GIVEN):
                of_all = _OF_ALL.get(op.payload)
                more = {} if of_all is None else {"x_global_scale": of_all}
                found.append({"x": given.x, **routing, **options, **_QUANTIZE[op.payload], **more})
            else:
                x, scales = cast_before(given.x, op.payload)
                found.append({"x": x, "scales": scales, **routing, **options})
                if scales is None:
                    found[-1]["x"] = x.view(torch.uint8)
        return found

    def _combines(self, op: TimedOperation) -> list[dict[str, Any]]:
        """Return the arguments of combine for each input."""
        options = {"wire": _wire(op.variant), "num_sms": op.sms or None}
        rows = self.rows(op)
        return [{"y": y, "handle": handle, **options} for y, handle in zip(rows, self._handles, strict=True)]

    def rows(self, op: TimedOperation) -> list[torch.Tensor]:
        """Return the inputs of combine, equal to the dispatched rows, in the window or not; created on first use."""
        if not self._handles:
            self._y[OUTSIDE] = []
            for given in self.dispatches(TimedOperation("dispatch", op.layout, "bf16", "", 0)):
                arrived = self.buffer.dispatch(**given)
                self._handles.append(arrived.handle)
                self._y[OUTSIDE].append(arrived.x.clone())
                del arrived  # frees window memory for the next
        where = IN_WINDOW if op.variant in (IN_WINDOW, ROWS_WIRE) else OUTSIDE
        if where not in self._y:
            outside = zip(self._handles, self._y[OUTSIDE], strict=True)
            self._y[where] = [self.buffer.empty(handle).copy_(y) for handle, y in outside]
        return self._y[where]

    def sms(self, op: TimedOperation) -> int:
        """Return the blocks (CPUs: threads) of an operation; for a pair, of its dispatch."""
        self._use(op.layout)
        return self._launched(op)["sms"]

    def _launched(self, op: TimedOperation) -> dict[str, int]:
        """Return the blocks (CPUs: threads) and, except for combine, chunk_tokens; for a pair, of its dispatch."""
        if op.what == "combine":
            return {"sms": prepare_combine(self.buffer, **self._combines(op)[0]).args.workers}
        args = prepare_dispatch(self.buffer, **self.dispatches(op)[0]).args
        return {"sms": args.workers, "chunk_tokens": args.chunk_tokens}

    def _bytes(self, op: TimedOperation) -> dict[str, float]:
        """Return the bytes of an operation as means over ranks and inputs, except `busiest_bytes` of the busiest link.

        `wire_bytes` and `busiest_bytes` count alike for every library: see RoundsCase.wire_bytes. `moved_bytes` are
        those that moecomm stores at other ranks, inside and across domains, tags and padding of packets included.
        `ideal_bytes` of them are rows and scales; `beside_bytes` are metadata, next to rows that go without packets.
        """
        names = ("wire", "busiest", "moved", "ideal", "inside", "across", "beside", "logical")
        found = dict.fromkeys(names, 0.0)
        near, far = self.traffic.crossing(direct=self.direct)
        for part in ("dispatch", "combine") if op.what == "pair" else (op.what,):
            row = self._case.wire_bytes(part, op.payload)
            inside, across = self._ideal(part, op)
            found["ideal"] += near * inside + far * across
            beside = self._case.beside_bytes(op.layout) if part == "dispatch" else 0
            packed = self._packed(part, op)
            inside, across = inside + beside if packed is None else packed, across + beside
            found["wire"] += self.traffic.wire() * row
            found["busiest"] += self.busiest * row
            found["inside"] += near * inside
            found["across"] += far * across
            found["logical"] += self.traffic.logical(op.layout) * row
            found["beside"] += (near + far) * beside
        found["moved"] = found["inside"] + found["across"]
        return {f"{name}_bytes": bytes_ for name, bytes_ in found.items()}

    def _packed(self, part: str, op: TimedOperation) -> float | None:
        """Return the bytes that are stored for a row in packets; None: rows do not travel in packets."""
        if part == "dispatch":
            return stored.of_dispatch(prepare_dispatch(self.buffer, **self.dispatches(op)[0]).args)
        if op.variant == ROWS_WIRE:
            return None
        scaled, exact = op.variant in (FP8_WIRE, INT8_WIRE), op.layout != "flat" and op.variant == FP32_WIRE
        row = self._case.hidden * (1 if scaled else 4 if exact else 2)
        how: dict[str, Any] = {"scaled": scaled, "exact": exact, "single": self.traffic.single_share()}
        return stored.of_combine(self.buffer.rounds.session.context.shape, self.tokens, row, **how)

    def _ideal(self, part: str, op: TimedOperation) -> tuple[float, int]:
        """Return the bytes of a row as it is sent inside a domain, and between domains, without what goes beside it."""
        row = self._case.wire_bytes(part, op.payload)
        if part == "dispatch":
            return row, row
        if op.variant == ROWS_WIRE:  # a row for each expert of a rank that the token has
            return row * self.traffic.wire(by_expert=True) / max(1, self.traffic.wire()), row
        if op.variant in (FP8_WIRE, INT8_WIRE):  # of the same bytes
            row = _native.staged_bytes(int(_native.Type.e4m3), self._case.hidden)
        if op.layout == "flat" or op.variant != FP32_WIRE:  # the default wire: sums cross in the dtype of y
            return row, row
        single = 0.0 if self._case.domain_ranks else self.traffic.single_share()  # such rows travel in the dtype of y
        return (2 - single) * row, 2 * row


def _extra_bytes(settings: Settings, inputs: int) -> int:
    """Return the window bytes for the rows and handles of all inputs but one, beside what a caller needs.

    Also for the rows and reduced rows of an eager pair: the graph that was timed before it keeps its own. A combine
    that finds no room for reduced rows sends them through a ring, which takes longer.
    """
    rows = settings.capacity_rows("flat") * settings.hidden * settings.dtype.itemsize
    tables = settings.max_tokens * settings.tables_bytes + 16 * settings.local_experts() + (1 << 16)
    return (inputs + 1) * (rows + tables)


def _nothing() -> None:
    pass


def _wire(variant: str) -> CombineWire | None:
    wires: dict[str, CombineWire] = {
        BF16_WIRE: torch.bfloat16,
        FP32_WIRE: "exact",
        FP8_WIRE: "fp8",
        INT8_WIRE: "int8",
        ROWS_WIRE: "rows",
    }
    return wires.get(variant)
