"""The steps of an expert layer: publish, dispatch, compute, reduce.

- `Fused`: rows are published, a dispatch sends row descriptors to the owners, one launch fetches the rows, computes
  both GEMMs and sends the results, and each source rank reduces the rows that it received.
- `Unfused`: a dispatch of rows, the experts, a combine.

Constructors launch nothing, allocate no memory of the window and do not communicate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from moecomm import combine, dispatch
from moecomm.core.arrays import as_output_tensor, as_tensor, check_no_overlap, check_rows, check_tensor
from moecomm.core.rounds import Rounds
from moecomm.core.spans import span
from moecomm.dispatch import PublishedOffsets
from moecomm.dispatch.arguments import check_routing
from moecomm.dispatch.reference import GROUP
from moecomm.fused import compute, kernels, schedules
from moecomm.fused.fp8 import Fp8
from moecomm.fused.operands import Operands
from moecomm.fused.publish import publish_kernel, row_pitch
from moecomm.fused.reduce import reduce_kernel
from moecomm.fused.schedules import Schedule
from moecomm.fused.structs import LayerArgs
from moecomm.jit.plain_kernel import PlainKernel, enqueue, load
from moecomm.routed import Routed

_LINE = 128 // 4  # scales in a cache line


class DispatchCall(NamedTuple):
    """A dispatch of a layer."""

    options: dispatch.Options
    tensors: tuple[Any, ...]  # x, topk_idx, topk_weights
    others: dict[str, Any]

    def prepare(self, rounds: Rounds) -> Routed:
        """See moecomm.dispatch.prepare."""
        return dispatch.prepare(rounds, self.options, *self.tensors, **self.others)


class Pipeline(Protocol):
    """An expert layer with checked arguments; methods are its steps, in order.

    Ranks of one process run each step for all of them before the next one.  Only `run_reduce` and the run of the
    dispatch may wait for other ranks.
    """

    def publish(self) -> None:
        """Copy this rank's rows to where peers read them."""
        ...

    def dispatch_call(self) -> DispatchCall:
        """Return the arguments of the dispatch, once rows are published."""
        ...

    def compute(self, routed: Routed) -> None:
        """Enqueue the experts, once the dispatch has been enqueued."""
        ...

    def prepare_reduce(self) -> None:
        """Do the part of the reduction that neither launches nor waits."""
        ...

    def run_reduce(self) -> None:
        """Add up the expert rows of this rank's tokens; waits for other ranks."""
        ...

    def stages(self) -> tuple[Callable[[], None], ...]:
        """Return what follows run_reduce() if it is verified: see combine.stages."""
        ...

    def finish_reduce(self) -> Any:
        """Return the layer's output."""
        ...


def start(rounds: Rounds, layer: Pipeline) -> Routed:
    """Run the steps up to the dispatch, which may not have arrived when this returns."""
    layer.publish()
    routed = layer.dispatch_call().prepare(rounds)
    dispatch.run(routed)
    return routed


def finish(rounds: Rounds, layer: Pipeline, routed: Routed, *, wait: bool = False) -> Any:
    """Run the other steps and return the layer's output.

    `wait`: wait for the dispatch first, and raise its error before the experts run.  CPU ranks always do.
    """
    dispatch.finish(rounds, routed)
    if wait and not rounds.on_cpu:
        rounds.wait()
        rounds.raise_failure()
        rounds.flight.settle()
    with span(rounds.flight.spans, "experts"):
        layer.compute(routed)
    layer.prepare_reduce()
    layer.run_reduce()
    for stage in layer.stages():
        stage()
    return layer.finish_reduce()


class Unfused:
    """Pipeline: the rows travel before and after the experts."""

    def __init__(
        self,
        rounds: Rounds,
        dispatching: DispatchCall,
        combining: combine.Options,
        outputs: dict[str, Any],
        experts: Callable[[Routed], torch.Tensor],
        back: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self._rounds, self._dispatching = rounds, dispatching
        self._options, self._outputs, self._experts, self._back = combining, outputs, experts, back
        self._routed: Routed | None = None
        self._y: torch.Tensor | None = None
        self._combining: combine.Combining | None = None

    def publish(self) -> None:
        """Do nothing: the rows travel with the dispatch."""

    def dispatch_call(self) -> DispatchCall:
        """Return the arguments of a dispatch of rows."""
        return self._dispatching

    def compute(self, routed: Routed) -> None:
        """Enqueue the expert GEMMs on the dispatched rows."""
        self._y, self._routed = self._experts(routed), routed

    def prepare_reduce(self) -> None:
        """Prepare the combine."""
        assert self._routed is not None
        self._combining = combine.prepare(
            self._rounds, self._options, self._y, self._routed.handle, **self._outputs, same_call=True
        )

    @property
    def args(self) -> Any:
        """Arguments of the combine."""
        assert self._combining is not None
        return self._combining.args

    @property
    def plan(self) -> combine.Plan:
        """Plan of the combine."""
        assert self._combining is not None
        return self._combining.plan

    def run_reduce(self) -> None:
        """Run the combine."""
        assert self._combining is not None
        combine.launch(self._combining)

    def stages(self) -> tuple[Callable[[], None], ...]:
        """Return what verifies the combine."""
        assert self._combining is not None
        return combine.stages(self._combining)

    def finish_reduce(self) -> Any:
        """Return the output of the combine."""
        assert self._combining is not None
        out = combine.finish(self._rounds, self._combining)
        return out if self._back is None or self._outputs["out"] is not None else self._back(out)


class Fused:
    """Pipeline: rows travel while the experts compute.

    The dispatch and the reduction wait for other ranks; the compute launch waits only for what they have announced.
    """

    def __init__(
        self,
        rounds: Rounds,
        x: torch.Tensor,
        topk_idx: Any,
        topk_weights: Any,
        w13: torch.Tensor | Fp8,
        w2: torch.Tensor | Fp8,
        *,
        interleaved: bool,
        out: Any,
        bias: Any,
        max_rows: int | None,
        num_sms: int | None,
        expected_rows: int,
        chunk: bool,
    ) -> None:
        self._rows = expected_rows  # of an expert
        self._rounds, self._apart = rounds, not interleaved
        self._sms = kernels.multiprocessors(rounds.device.index)
        self._w13, self._w2 = ((w, None) if isinstance(w, torch.Tensor) else w for w in (w13, w2))
        self._dtype = self._w2[0].dtype  # of published rows and of the first product
        self._counted = compute.rows_per_counter(expected_rows * len(self._w2[0]))
        tokens, hidden = len(x), rounds.hidden
        check_rows("x", x)
        about: dict[str, Any] = {"device": rounds.device, "dtypes": (rounds.dtype,)}
        topk_idx, topk_weights = check_routing(rounds, tokens, topk_idx, topk_weights)
        shape = (tokens, hidden)
        self.out = x.new_empty(shape) if out is None else as_output_tensor("out", out, **about, shape=shape)
        args = self._args = LayerArgs(x=x.data_ptr(), x_stride=2 * x.stride(0), num_tokens=tokens)
        args.out, args.out_stride = self.out.data_ptr(), check_rows("out", self.out)
        if bias is not None:
            bias = as_tensor("bias", bias)[0]
            one_row = bias.ndim == 1
            check_tensor("bias", bias, **about, shape=(hidden,) if one_row else (tokens, hidden))
            stride = check_rows("bias", bias.unsqueeze(0) if one_row else bias)
            args.bias, args.bias_stride = bias.data_ptr(), 0 if one_row else stride
        if out is not None:
            check_no_overlap("out", self.out, bias=bias, topk_weights=topk_weights)
        if topk_weights is not None:
            args.weights = topk_weights.data_ptr()
        worst = rounds.settings.worst_rows("expert", rank=rounds.rank)
        rows = rounds.settings.capacity_rows("expert", rank=rounds.rank) if max_rows is None else min(max_rows, worst)
        args.max_rows = self._max_rows = max(1, rows)
        args.row_tiles = len(self._w2[0]) + self._max_rows // self._schedule.most_rows
        self._x, self._topk_idx, self._num_sms = x, topk_idx, num_sms
        self._room: dict[str, Any] = {"max_rows": max_rows, "chunk": chunk}
        self._kept: list[Any] = [x, topk_idx, topk_weights, bias]
        self._reduce = reduce_kernel(rounds.dtype, hidden, rounds.topk)

    @cached_property
    def _schedule(self) -> Schedule:
        gpu = kernels.gpu_name(self._rounds.device.index)
        return schedules.schedule_of_both(self._dtype, self._rows, self._w2[0].shape[2], gpu)

    def publish(self) -> None:
        """Allocate window memory for published rows and the receive buffer, and launch the publish kernel."""
        rounds, args, tokens = self._rounds, self._args, max(1, len(self._x))
        context, hidden = rounds.session.context, rounds.hidden
        ctypes.memmove(args.ctx, context.address, context.nbytes)
        pitch, received = row_pitch(self._dtype, hidden), rounds.topk * 2 * hidden  # of a token
        blocks = rounds.memory.allocate(tokens * pitch, tokens * received)
        args.published, args.received = (block.offset for block in blocks)
        fetched = -(-self._max_rows // kernels.LEAST_COUNTED)
        counters = torch.empty(3 + fetched + args.row_tiles, dtype=torch.int32, device=rounds.device)
        args.failed = counters.data_ptr()
        args.next_tile, args.next_row, args.fetched = (args.failed + 4 * place for place in (1, 2, 3))
        args.tile_done = args.fetched + 4 * fetched
        self._kept += [blocks, counters]
        rounds.session.order()  # a round on another stream may still use this memory of the window
        self._launch(publish_kernel(rounds.dtype, self._dtype, hidden), self._sms, args)

    def dispatch_call(self) -> DispatchCall:
        """Return the arguments of a dispatch of row descriptors."""
        published = PublishedOffsets(
            self._args.published, row_pitch(self._dtype, self._rounds.hidden), self._args.received
        )
        return DispatchCall(
            dispatch.Options("expert", num_sms=self._num_sms),
            (self._x, self._topk_idx),
            {**self._room, "sync": False, "descriptors": published},
        )

    def compute(self, routed: Routed) -> None:
        """Enqueue the launch that fetches rows, computes both GEMMs and sends the results."""
        schedule, hidden = self._schedule, self._rounds.hidden
        clusters, how = self._sms // schedule.cluster, (self._rows, self._counted)
        first, second = self._operands(routed)
        args = compute.layer_args(self._args, first, second, self._apart, schedule, *how, clusters)
        kernel = compute.layer_kernel(self._dtype, self._apart, schedule, hidden, self._rounds.dtype, self._counted)
        self._launch(kernel, clusters * schedule.cluster, args)

    def _operands(self, routed: Routed) -> tuple[Operands, Operands]:
        """Return the operands of the two GEMMs: room for fetched rows, and for the first product.

        In FP8, each row's scales of the first product begin at a cache line.
        """
        args, given, rounds = self._args, routed.args, self._rounds
        base = rounds.session.context.peers[rounds.rank]
        args.owners, args.descriptors = given.route.token_owner, base + given.out_x
        args.num_rows = given.num_rows
        _, hidden, inner = self._w2[0].shape
        pool = torch.empty(self._max_rows, row_pitch(self._dtype, hidden), dtype=torch.uint8, device=rounds.device)
        x, x_scales = pool[:, : self._dtype.itemsize * hidden].view(self._dtype), None
        h, h_scales = torch.empty(self._max_rows, inner, dtype=self._dtype, device=rounds.device), None
        if self._dtype == kernels.FP8:
            x_scales = pool[:, hidden : hidden + 4 * -(-hidden // GROUP)].view(torch.float32)
            of_row = -(-inner // GROUP)
            pitch = -(-of_row // _LINE) * _LINE
            h_scales = torch.empty(self._max_rows, pitch, dtype=torch.float32, device=rounds.device)[:, :of_row]
        destinations = torch.empty(self._max_rows, dtype=torch.int64, device=rounds.device)
        args.rows, args.destinations = pool.data_ptr(), destinations.data_ptr()
        self._kept += [routed, pool, h, h_scales, destinations]
        counts = routed.tokens_per_expert
        return (
            Operands(x, self._w13[0], counts, x_scales, self._w13[1]),
            Operands(h, self._w2[0], counts, h_scales, self._w2[1]),
        )

    def prepare_reduce(self) -> None:
        """Load the kernel of the reduction."""
        load(self._reduce, self._rounds.device.index)

    def run_reduce(self) -> None:
        """Launch the reduction."""
        sharing = max(1, self._sms // self._rounds.session.most_blocks)
        # Blocks wait for peers: where ranks share a GPU, leave multiprocessors to the experts of the other ranks.
        blocks = self._sms if sharing == 1 else max(1, self._sms // (2 * sharing))
        flight = self._rounds.flight
        kind = flight.kind("reduce", 0, self._rounds.dtype, self._rounds.hidden * self._rounds.dtype.itemsize)
        record = flight.begin(kind, len(self._x))
        self._launch(self._reduce, blocks, self._args)
        flight.end(record)

    def stages(self) -> tuple[Callable[[], None], ...]:
        """Nothing: rows of fused layers are not verified."""
        return ()

    def finish_reduce(self) -> torch.Tensor:
        """Return the layer's output; frees memory that the kernels used, for later work on the stream."""
        self._kept = []
        return self.out

    def _launch(self, kernel: PlainKernel, blocks: int, args: ctypes.Structure) -> None:
        session, index = self._rounds.session, self._rounds.device.index
        session.with_device(enqueue, index, kernel, blocks, args, session.exclusive_gpu)
