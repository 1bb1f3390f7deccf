"""moecomm's own timed operations: dispatch, combine, and pairs of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from moecomm import _native
from moecomm.bench import overlap
from moecomm.bench.case import Case, Traffic
from moecomm.bench.clock import Clock
from moecomm.buffer import Buffer
from moecomm.core.choices import Wire
from moecomm.errors import BadInput
from moecomm.routed import Handle
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

IN_WINDOW, OUTSIDE = "y in the window", "y outside"  # variants of combine with flat rows
FP32_WIRE, BF16_WIRE = "fp32 wire", "bf16 wire"  # variants of combine in the other layouts
_QUANTIZE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantize": "fp8"},
    "fp8-column": {"quantize": "fp8", "scale_layout": "column"},
    "fp8-ue8m0": {"quantize": "fp8", "scale_format": "ue8m0"},
    "fp8-ue8m0-column": {"quantize": "fp8", "scale_format": "ue8m0", "scale_layout": "column"},
}


@dataclass(frozen=True)
class Operation:
    """A timed operation.

    Attributes:
        what: "dispatch", "combine" or "pair": a dispatch, then a combine of the rows that arrived (of bf16 rows if
            these are fp8).
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


def operations(case: Case) -> list[Operation]:
    """Return all operations of a case at one size, grouped by layout."""
    found = []
    for layout in case.layouts:
        variants = (IN_WINDOW, OUTSIDE) if layout == "flat" else (FP32_WIRE, BF16_WIRE)
        for sms in case.sms:
            found += [Operation("dispatch", layout, payload, "", sms) for payload in case.payloads]
            found += [Operation("combine", layout, "", variant, sms) for variant in variants]
            if case.pairs:
                found += [Operation("pair", layout, payload, variants[0], sms) for payload in case.payloads]
    return found


class Ours:
    """A Buffer for one size, and its timed operations. Collective; a context manager."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device, tokens: int) -> None:
        self._case, self.tokens = case, tokens
        topk_idx, weights = case.routing(tokens, group.rank())
        self.traffic = Traffic.of(group, topk_idx, case.experts, case.domain_ranks)
        generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + group.rank())
        self.x = torch.randn(tokens, case.hidden, generator=generator, device=device).to(torch.bfloat16)
        self.topk_idx, self.weights = topk_idx.to(device), weights.to(device)
        self.buffer = Buffer(
            group,
            hidden=case.hidden,
            num_experts=case.experts,
            topk=case.topk,
            max_tokens=tokens,
            backend=case.backend,
            device=device,
            domain_ranks=case.domain_ranks or None,
        )
        mode = {"graph": case.mode == "graph", "cold": case.cold}
        self.clock = Clock(group, device, **mode, chain=case.chain_of(tokens), replays=case.replays)
        # True if rows go to other domains without a forwarder; unused with one domain.
        self.direct = _native.goes_direct(self.buffer.rounds.session.context.shape, tokens)
        self._layout = ""
        self._handle: Handle | None = None
        self._y: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Ours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._y, self._handle = {}, None
        self.buffer.close()

    def memory(self) -> dict[str, int]:
        """Return the bytes of this rank's window: all of them, and those that are not room for outputs."""
        outputs = self.buffer.rounds.session.context.shape.heap_bytes
        return {"tokens": self.tokens, "window": self.buffer.nbytes, "beyond_outputs": self.buffer.nbytes - outputs}

    def row(self, op: Operation, *, host: bool = True) -> dict[str, Any]:
        """Measure an operation on this rank; returns its row, or one with `why` it has no figures.

        `us` is by replay, bytes are of all ranks; with `host` the row also has `host_us`.
        """
        row: dict[str, Any] = {"who": "moecomm", "tokens": self.tokens, "sms_asked": op.sms}
        row |= {"what": op.what, "layout": op.layout, "payload": op.payload, "variant": op.variant}
        try:
            call = self.call(op)
            row |= {"straight": self.direct} | self._launched(op) | self._bytes(op)
            row |= {"us": self.clock(call), "host_us": self.clock.host_us(call) if host else None}
            self.buffer.check()
        except BadInput as error:  # no room in the window, on all ranks alike
            row["why"] = str(error)
        return row

    def call(self, op: Operation) -> Callable[[], Any]:
        """Return the operation as a caller would write it."""
        if self._layout != op.layout:  # frees the window memory of the earlier layout
            self._layout, self._handle, self._y = op.layout, None, {}
        if op.what == "dispatch":
            return partial(self.buffer.dispatch, **self._dispatch_arguments(op))
        if op.what == "combine":
            return partial(self.buffer.combine, **self._combine_arguments(op))
        given, wire = self._dispatch_arguments(op), _wire(op.variant)
        quantized = "quantize" in given
        y = self._rows(op) if quantized and op.variant != IN_WINDOW else None

        def pair() -> None:
            arrived = self.buffer.dispatch(**given)
            rows = arrived.x  # in the cache, as experts would leave them
            if quantized:
                rows = self.buffer.empty(arrived.handle) if y is None else y
            self.buffer.combine(rows, arrived.handle, wire=wire, num_sms=op.sms or None)

        return pair

    def halves(self, op: Operation, us: float) -> dict[str, list[float]]:
        """Time the halves of a dispatch that takes `us` microseconds: see overlap.halves."""
        return overlap.halves(self.clock, self.buffer, self._dispatch_arguments(op), us)

    def _dispatch_arguments(self, op: Operation) -> dict[str, Any]:
        routing = {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.weights}
        sizes = {"layout": op.layout, "max_rows": self._most_rows(op.layout), "sync": False}
        return {**routing, **sizes, "num_sms": op.sms or None, **_QUANTIZE[op.payload]}

    def _most_rows(self, layout: str) -> int:
        """Return the most rows that a rank receives; room for exactly these makes the largest sizes fit."""
        sent = self.traffic.rows if layout == "flat" else self.traffic.entries
        return max(1, int(sent.sum(dim=0).max()))

    def _combine_arguments(self, op: Operation) -> dict[str, Any]:
        y = self._rows(op)
        return {"y": y, "handle": self._handle, "wire": _wire(op.variant), "num_sms": op.sms or None}

    def _rows(self, op: Operation) -> torch.Tensor:
        """Return the input of combine, equal to the dispatched rows, in the window or not; created on first use."""
        if self._handle is None:
            arrival = Operation("dispatch", op.layout, "bf16", "", 0)
            arrived = self.buffer.dispatch(**self._dispatch_arguments(arrival))
            self._handle, self._y[OUTSIDE] = arrived.handle, arrived.x.clone()
        where = IN_WINDOW if op.variant == IN_WINDOW else OUTSIDE
        if where not in self._y:
            self._y[where] = self.buffer.empty(self._handle).copy_(self._y[OUTSIDE])
        return self._y[where]

    def _launched(self, op: Operation) -> dict[str, int]:
        """Return the blocks (CPUs: threads) and, except for combine, chunk_tokens; for a pair, of its dispatch."""
        if op.what == "combine":
            return {"sms": prepare_combine(self.buffer, **self._combine_arguments(op)).args.workers}
        args = prepare_dispatch(self.buffer, **self._dispatch_arguments(op)).args
        return {"sms": args.workers, "chunk_tokens": args.chunk_tokens}

    def _bytes(self, op: Operation) -> dict[str, float]:
        """Return the bytes of an operation as means over ranks, except `busiest_bytes` of the busiest link.

        `wire_bytes` are the sum of bytes inside and across domains; `beside_bytes` of these are metadata.
        """
        found = dict.fromkeys(("wire", "inside", "across", "beside", "busiest", "logical"), 0.0)
        near, far = self.traffic.crossing(direct=self.direct)
        for part in ("dispatch", "combine") if op.what == "pair" else (op.what,):
            inside, across, logical = self._row_bytes(part, op)
            found["inside"] += near * inside
            found["across"] += far * across
            found["busiest"] += self.traffic.busiest() * inside
            found["logical"] += self.traffic.logical(op.layout) * logical
            if part == "dispatch":
                found["beside"] += (near + far) * self._case.beside_bytes(op.layout)
        found["wire"] = found["inside"] + found["across"]
        return {f"{name}_bytes": bytes_ for name, bytes_ in found.items()}

    def _row_bytes(self, part: str, op: Operation) -> tuple[float, int, int]:
        """Return the bytes of a row inside a domain, between domains, and as handed out (or in)."""
        if part == "dispatch":
            row = self._case.row_bytes(op.payload)
            moved = row + self._case.beside_bytes(op.layout)
            return moved, moved, row
        row = 2 * self._case.hidden
        if op.layout == "flat":  # the default wire: sums cross in the dtype of y
            return row, row, row
        if op.variant != FP32_WIRE:
            return row, row, row
        single = 0.0 if self._case.domain_ranks else self.traffic.single_share()  # such rows travel in the dtype of y
        return (2 - single) * row, 2 * row, row


def _wire(variant: str) -> Wire | None:
    return torch.bfloat16 if variant == BF16_WIRE else "exact" if variant == FP32_WIRE else None
