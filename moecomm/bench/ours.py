"""moecomm's own operations, timed: dispatch, combine, and the two after each other."""

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
from moecomm.errors import BadInput
from moecomm.routed import Handle
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

IN_WINDOW, OUTSIDE = "y in the window", "y outside"  # combine of flat rows
FP32_WIRE, BF16_WIRE = "fp32 wire", "bf16 wire"  # combine of the others
_QUANTIZE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantize": "fp8"},
    "fp8-column": {"quantize": "fp8", "scale_layout": "column"},
    "fp8-ue8m0": {"quantize": "fp8", "scale_format": "ue8m0"},
    "fp8-ue8m0-column": {"quantize": "fp8", "scale_format": "ue8m0", "scale_layout": "column"},
}


@dataclass(frozen=True)
class Operation:
    """What is timed: `what` is dispatch, combine or pair (a dispatch, then a combine of the rows that came; of others
    where those are fp8).

    `payload`: of dispatch; `variant`: of combine; empty where there is none.  `sms`: 0 as the table says.
    """

    what: str
    layout: str
    payload: str
    variant: str
    sms: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return " ".join(filter(None, ("moecomm", self.what, self.layout, self.payload, self.variant)))


def operations(case: Case) -> list[Operation]:
    """All operations of a case at one size, those of a layout together."""
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
    """A Buffer for one size, and its operations.  Collective; a context manager."""

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
        # Whether rows reach other domains without a relay: one domain has none.
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
        """Bytes of this rank's window: all of it, and what is not room for outputs."""
        outputs = self.buffer.rounds.session.context.shape.heap_bytes
        return {"tokens": self.tokens, "window": self.buffer.nbytes, "beyond_outputs": self.buffer.nbytes - outputs}

    def row(self, op: Operation, *, host: bool = True) -> dict[str, Any]:
        """What this rank found: `us` by replay, bytes of all ranks, with `host` also `host_us`; or `why` not."""
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
        """The operation as a caller writes it."""
        if self._layout != op.layout:  # what an earlier layout holds of the window makes room
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
            rows = arrived.x  # as warm as experts would have left them
            if quantized:
                rows = self.buffer.empty(arrived.handle) if y is None else y
            self.buffer.combine(rows, arrived.handle, wire=wire, num_sms=op.sms or None)

        return pair

    def halves(self, op: Operation, us: float) -> dict[str, list[float]]:
        """Of a dispatch that takes so many microseconds: see overlap.halves."""
        return overlap.halves(self.clock, self.buffer, self._dispatch_arguments(op), us)

    def _dispatch_arguments(self, op: Operation) -> dict[str, Any]:
        routing = {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.weights}
        sizes = {"layout": op.layout, "max_rows": self._most_rows(op.layout), "sync": False}
        return {**routing, **sizes, "num_sms": op.sms or None, **_QUANTIZE[op.payload]}

    def _most_rows(self, layout: str) -> int:
        """The most that a rank receives: room for exactly that leaves the largest sizes their place in memory."""
        sent = self.traffic.rows if layout == "flat" else self.traffic.entries
        return max(1, int(sent.sum(dim=0).max()))

    def _combine_arguments(self, op: Operation) -> dict[str, Any]:
        y = self._rows(op)
        return {"y": y, "handle": self._handle, "wire": _wire(op.variant), "num_sms": op.sms or None}

    def _rows(self, op: Operation) -> torch.Tensor:
        """Rows to bring home, as they arrived, where the variant wants them; made when first asked for."""
        if self._handle is None:
            arrival = Operation("dispatch", op.layout, "bf16", "", 0)
            arrived = self.buffer.dispatch(**self._dispatch_arguments(arrival))
            self._handle, self._y[OUTSIDE] = arrived.handle, arrived.x.clone()
        where = IN_WINDOW if op.variant == IN_WINDOW else OUTSIDE
        if where not in self._y:
            self._y[where] = self.buffer.empty(self._handle).copy_(self._y[OUTSIDE])
        return self._y[where]

    def _launched(self, op: Operation) -> dict[str, int]:
        """Blocks (CPUs: threads) and, of a dispatch, tokens of a chunk, as they will be; of a pair: of its dispatch."""
        if op.what == "combine":
            return {"sms": prepare_combine(self.buffer, **self._combine_arguments(op)).args.workers}
        args = prepare_dispatch(self.buffer, **self._dispatch_arguments(op)).args
        return {"sms": args.workers, "chunk_tokens": args.chunk_tokens}

    def _bytes(self, op: Operation) -> dict[str, float]:
        """Means over ranks, but for `busiest_bytes`: of the busiest link.  `wire_bytes` are those inside domains and
        those across; `beside_bytes` of them are neither columns nor scales.
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

    def _row_bytes(self, part: str, op: Operation) -> tuple[int, int, int]:
        """Of a row between ranks of a domain, of one between domains, and of one that is handed out (or in)."""
        if part == "dispatch":
            row = self._case.row_bytes(op.payload)
            moved = row + self._case.beside_bytes(op.layout)
            return moved, moved, row
        row = 2 * self._case.hidden
        if op.layout == "flat":  # a relay's sum of flat rows is float32
            return row, row if self.direct else 2 * row, row
        wire = (4 if op.variant == FP32_WIRE else 2) * self._case.hidden
        return wire, wire, row


def _wire(variant: str) -> torch.dtype | None:
    return torch.bfloat16 if variant == BF16_WIRE else None
