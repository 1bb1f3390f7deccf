"""Rows to experts and home again, exactly as many as there are, with gradients; one Buffer for all layers.

moecomm.ops has static shapes, for graphs; a training framework that splits rows by counts on the host wants exact
ones, and memory for the rows that came instead of for the worst case.  The host waits for the counts, so rows that have
no room in the window go in several rounds: see moecomm/dispatch/chunks.py.  Where experts are padded to their capacity,
see padded.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from moecomm import combine as combining
from moecomm import dispatch
from moecomm.base.choices import Quantize
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.pool import grown
from moecomm.dispatch.routed import ChunkedHandle, Handle, Routed
from moecomm.dispatch.tables import over, tables_of
from moecomm.gpu import padding
from moecomm.integrations.megatron.buffers import PLAIN, Buffers, Formats, Key, Limits
from moecomm.ops import handles
from moecomm.ops.rounds import Cast, rows_as_asked, rows_of
from moecomm.ranks.settings import Settings
from moecomm.rounds.state import CollectiveCall

_ALIGNMENT = 128  # the largest that Settings.round_bytes has room for


class ExpertExchange(Buffers):
    """Dispatch by expert, and combine, between the ranks of a group.

    Args:
        group: a torch.distributed process group.
        num_experts: of all its ranks.
        topk: the most experts a token picks.
        limits: see Limits.
    """

    def __init__(self, group: Any, num_experts: int, topk: int, limits: Limits) -> None:
        super().__init__(group, num_experts, topk, limits)
        self._buffers: dict[Key, Buffer] = {}

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        alignment: int,
        formats: Formats = PLAIN,
    ) -> ExpertDispatched:
        """Collective.  Gradients: x and topk_weights.

        Args:
            x: `[T, H]`.
            topk_idx: int64 `[T, K]`, -1 picks none.
            topk_weights: floating `[T, K]`.
            alignment: the rows of an expert are filled up to a multiple of it, with zeros.
            formats: see there.

        Raises:
            As Buffer and Buffer.dispatch.
        """
        given = (x, topk_weights, topk_idx, self, alignment, formats)
        found = _ExpertDispatch.apply(*given)  # type: ignore[no-untyped-call]
        rows, weights, counts, way, graph = found
        return ExpertDispatched(rows, weights, counts, way._replace(graph=graph))

    @staticmethod
    def combine(y: torch.Tensor, way: ReturnWay) -> torch.Tensor:
        """The sum of each token's rows, without weights: `[T, H]`.  Collective.  Gradient: y.

        Raises:
            As Buffer.combine.
        """
        # Schedules cut y off from the dispatch, and run the backward pass of each stage themselves.
        graph = None if y.requires_grad else way.graph
        out: torch.Tensor = _ExpertCombine.apply(y, graph, way._replace(graph=None))  # type: ignore[no-untyped-call]
        return out

    def route(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        alignment: int,
        quantize: Quantize | None,
    ) -> Routed:
        """Buffer.dispatch; where a rank has more tokens than the Buffer takes, again with a larger one."""
        key = (x.shape[1], x.dtype, x.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.closed:
            tokens = max(len(x), self.limits.max_tokens or 1)
            buffer = self._buffers[key] = self._open(key, tokens, self._window)

        def larger() -> Buffer:
            # Handles of the smaller one stay good, and keep it, until the backward passes they wait for.
            tokens = max(len(x), buffer.max_tokens + buffer.max_tokens // 4)
            self._buffers[key] = self._open(key, tokens, self._window)
            return self._buffers[key]

        def one(buffer: Buffer) -> Routed:
            return self._dispatch(buffer, x, topk_idx, weights, alignment, quantize)

        return grown(buffer, x, topk_idx, one, larger, layout="expert", alignment=alignment)

    def _dispatch(
        self,
        buffer: Buffer,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        alignment: int,
        quantize: Quantize | None,
    ) -> Routed:
        return buffer.dispatch(
            x,
            topk_idx,
            weights,
            layout="expert",
            expert_alignment=alignment,
            quantize=quantize,
            max_rows=self.limits.max_rows,
            num_sms=self.limits.num_sms,
            sync=True,
        )

    def _window(self, settings: Settings) -> int | None:
        max_rows = self.limits.max_rows
        if max_rows is None:
            return None
        spared = (
            max(0, settings.worst_rows("expert", _ALIGNMENT) - max_rows) * settings.hidden * settings.dtype.itemsize
        )
        return -(-2 * (settings.round_bytes("expert") - spared) // 4096) * 4096


class ReturnWay(NamedTuple):
    """The routing of a dispatch, by which its rows return; `graph` is that of moecomm.ops.Handle."""

    handle: Handle
    num_sms: int | None
    grad_wire: Quantize | None
    graph: torch.Tensor | None = None


class ExpertDispatched(NamedTuple):
    """The result of ExpertExchange.dispatch.

    x `[rows, H]` and weights float32 `[rows]` by expert, with zeros in padding; tokens_per_expert int64 `[E/R]` on the
    CPU, padding included, which adds up to `rows`; and the `way` that combine() takes.
    """

    x: torch.Tensor
    weights: torch.Tensor
    tokens_per_expert: torch.Tensor
    way: Any


class _ExpertDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        topk_idx: torch.Tensor,
        exchange: ExpertExchange,
        alignment: int,
        formats: Formats,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ReturnWay, torch.Tensor]:
        given = (rows_of(x), topk_idx.contiguous(), weights.float().contiguous())
        routed = exchange.route(*given, alignment, formats.quantize)
        handle = routed.handle
        rows, _ = rows_as_asked(handle.rounds, routed, Cast(formats.quantize))
        if isinstance(handle, ChunkedHandle):  # rows and tables lie outside of the window, with zeros in padding
            row_weights: torch.Tensor = routed.row_weights  # type: ignore[assignment]  # by expert, there are some
        else:
            if alignment > 1:
                padding.zero(rows, src=routed.src)
            handle = over(tables_of(routed), handle)
            row_weights = handles.row_weights(handle)
        ctx.way, ctx.weights_dtype = ReturnWay(handle, exchange.limits.num_sms, formats.grad_wire), weights.dtype
        counts = routed.rows_per_expert.to("cpu", copy=True)
        ctx.mark_non_differentiable(counts)
        return rows, row_weights, counts, ctx.way, x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, grad_weights: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[1]:  # alike on all ranks, as their models are
            return _home(grad_x, ctx.way), None, None, None, None, None
        with CollectiveCall(ctx.way.handle.rounds):
            x, weights = _home(grad_x, ctx.way, weight_grads=grad_weights.float().contiguous())
        return x, weights.to(ctx.weights_dtype), None, None, None, None


class _ExpertCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, graph: torch.Tensor | None, way: ReturnWay) -> torch.Tensor:
        ctx.way, ctx.dtype = way, y.dtype
        out: torch.Tensor = _home(y, way)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        handle, num_sms, grad_wire, _ = ctx.way
        with CollectiveCall(handle.rounds):
            grad, options = rows_of(grad.to(handle.rounds.dtype)), dispatch.Options(quantize=grad_wire, num_sms=num_sms)
            routed = dispatch.dispatch(handle.rounds, dispatch.Request(options), grad, handle=handle)
            rows, _ = rows_as_asked(handle.rounds, routed, Cast(grad_wire))
        if isinstance(handle, ChunkedHandle):
            return rows.to(ctx.dtype), None, None
        if handle.args.alignment > 1:
            padding.zero(rows, src=handles.sources(handle))
        return rows.to(ctx.dtype), None, None


def _home(rows: torch.Tensor, way: ReturnWay, **tensors: Any) -> Any:
    """Add a rank's rows of a token in float32, and round the sum before it travels: half the bytes of "exact".

    The call names the dtype of the rows, so that no default of a Buffer changes it.
    """
    handle, num_sms, _, _ = way
    with CollectiveCall(handle.rounds):
        options = combining.Options(weighted=False, wire=rows.dtype, num_sms=num_sms)
        return combining.combine(handle.rounds, combining.Request(options), rows_of(rows), handle, **tensors)
