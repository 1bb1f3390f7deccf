"""The steps of an expert layer: publish, dispatch, compute, reduce.

- `Fused`: rows are published, a dispatch sends row descriptors to the owners, one launch fetches the rows, computes
  both GEMMs and sends the results, and each source rank reduces the rows that it received.
- `Unfused`: a dispatch of rows, the experts, a combine.

Constructors launch nothing, allocate no memory of the window and do not communicate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from moecomm import combine, dispatch
from moecomm.base.arrays import as_output_tensor, as_tensor, check_no_overlap, check_rows, check_tensor
from moecomm.dispatch import PublishedOffsets
from moecomm.dispatch.arguments import check_routing
from moecomm.dispatch.routed import Routed
from moecomm.fused import compute, gemm
from moecomm.fused.activations import GatedActivation
from moecomm.fused.biases import Biases
from moecomm.fused.kernels import Epilogue, reduce_kernel
from moecomm.fused.plan import layer_plan
from moecomm.fused.weight_format import WeightFormat
from moecomm.gpu.plain_kernel import PlainKernel, enqueue, load
from moecomm.gpu.structs import struct
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.spans import span


class DispatchCall(NamedTuple):
    """Arguments of the dispatch of a layer; `others`: further ones of dispatch.prepare, by name."""

    request: dispatch.Request
    tensors: tuple[Any, ...]  # x, topk_idx, topk_weights
    others: dict[str, Any]

    def prepare(self, rounds: Rounds) -> Routed:
        return dispatch.prepare(rounds, self.request, *self.tensors, **self.others)


class Pipeline(Protocol):
    """An expert layer with checked arguments; methods are its steps, in order.

    A thread that drives several ranks runs each step on all of them before the next one.  So only `run_reduce` and the
    dispatch itself may wait for other ranks.
    """

    def reserve(self) -> object:
        """Take the memory of a call, as long as the result is kept.  Raises the error of too little memory."""
        ...

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
        """Return the steps that verify run_reduce(), if any: see combine.stages."""
        ...

    def finish_reduce(self) -> Any:
        """Return the layer's output."""
        ...


def start(rounds: Rounds, layer: Pipeline) -> Routed:
    """Run the steps up to the dispatch, which may not have arrived when this returns."""
    layer.publish()
    routed = layer.dispatch_call().prepare(rounds)
    dispatch.run(routed)
    rounds.count_round()
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
    rounds.count_round()  # a combine, or what stands for one
    return layer.finish_reduce()


class Unfused:
    """Pipeline: dispatch, the experts, combine, one after the other."""

    def __init__(
        self,
        rounds: Rounds,
        dispatching: DispatchCall,
        combining: combine.Request,
        outputs: dict[str, Any],
        experts: Callable[[Routed], torch.Tensor],
        back: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self._rounds, self._dispatching = rounds, dispatching
        self._request, self._outputs, self._experts, self._back = combining, outputs, experts, back
        self._routed: Routed | None = None
        self._y: torch.Tensor | None = None
        self._combining: combine.Combining | None = None

    def reserve(self) -> object:
        """Take the memory of the dispatch, and as much as the experts take."""
        routed = self._dispatching.prepare(self._rounds)
        rows, _, _ = routed.plan.layer_tensors(routed)
        return routed, rows.new_empty((len(rows), 2, self._rounds.hidden), dtype=self._rounds.dtype)

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
            self._rounds,
            self._request,
            self._y,
            self._routed.handle,
            **self._outputs,
            same_call=True,
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
        """Return the steps that verify the combine."""
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
        weights: WeightFormat,
        w13: Any,
        w2: Any,
        *,
        interleaved: bool,
        activation: GatedActivation,
        biases: Biases,
        out: Any,
        bias: Any,
        max_rows: int | None,
        expected_rows: int,
        unsummed: bool,
        request: dispatch.Request,
        others: dict[str, Any],
    ) -> None:
        session, tokens, hidden = rounds.session, x.shape[0], rounds.hidden
        self._rounds, self._session = rounds, session
        self._w13 = w13 if isinstance(w13, tuple) else (w13, None)
        self._w2 = w2 if isinstance(w2, tuple) else (w2, None)
        dtype, inner = weights.product or self._w2[0].dtype, self._w13[0].shape[1] // 2
        self._activation, self._biases = activation, biases
        epilogue = Epilogue(activation.kernel, biases[0] is not None or biases[1] is not None, weights.casts)
        of_rank = (rounds.settings, rounds.rank, rounds.device.index)
        how: dict[str, Any] = {"epilogue": epilogue, "packed": weights.packed > 1}
        self._plan = layer_plan(*of_rank, dtype, inner, not interleaved, expected_rows, max_rows, **how)
        self._reduce = self._plan.reduce
        if unsummed:
            self._reduce = reduce_kernel(rounds.dtype, hidden, rounds.topk, by_k=True)
        args = self._args = struct("LayerArgs")(x=x.data_ptr(), x_stride=check_rows("x", x), num_tokens=tokens)
        args.max_rows, args.row_tiles = self._plan.max_rows, self._plan.row_tiles
        about: dict[str, Any] = {"device": rounds.device, "dtypes": (rounds.dtype,)}
        topk_idx, topk_weights = check_routing(rounds, tokens, topk_idx, topk_weights)
        shape = (tokens, hidden)
        self.out = x.new_empty(shape) if out is None else as_output_tensor("out", out, **about, shape=shape)
        args.out, args.out_stride = self.out.data_ptr(), check_rows("out", self.out)
        if bias is not None:
            bias = as_tensor("bias", bias)[0]
            one_row = bias.ndim == 1
            check_tensor("bias", bias, **about, shape=(hidden,) if one_row else shape)
            stride = check_rows("bias", bias.unsqueeze(0) if one_row else bias)
            args.bias, args.bias_stride = bias.data_ptr(), 0 if one_row else stride
        if out is not None:
            check_no_overlap("out", self.out, bias=bias, topk_weights=topk_weights)
        if topk_weights is not None:
            args.weights = topk_weights.data_ptr()
        self._x, self._topk_idx, self._request = x, topk_idx, request
        self._room: dict[str, Any] = {"max_rows": max_rows, **others}
        self._scratch = 0  # address of memory that has the layout of the plan
        self._kept: list[Any] = [x, topk_idx, topk_weights, bias]

    def reserve(self) -> tuple[Any, Any, torch.Tensor]:
        """Allocate memory in the window for published rows and for received ones, and outside of it."""
        rounds, plan, tokens = self._rounds, self._plan, max(1, self._args.num_tokens)
        sizes = tokens * plan.pitch, tokens * rounds.topk * 2 * rounds.hidden
        published, received = map(rounds.memory.scratch, sizes)
        return published, received, torch.empty(plan.scratch.nbytes, dtype=torch.uint8, device=rounds.device)

    def publish(self) -> None:
        """Allocate memory of the layer, in the window and outside of it, and launch the publish kernel."""
        session, args, plan = self._session, self._args, self._plan
        at = plan.scratch
        ctypes.memmove(args.ctx, session.context.address, session.context.nbytes)
        published, received, scratch = self.reserve()
        args.published, args.received = published.offset, received.offset
        begin = self._scratch = args.failed = scratch.data_ptr()
        args.next_tile, args.next_row = begin + at.next_tile, begin + at.next_row
        args.fetched, args.tile_done = begin + at.fetched, begin + at.tile_done
        args.destinations, args.rows = begin + at.destinations, begin + at.rows
        self._kept += [published, received, scratch]
        session.order()  # a round on another stream may still use this memory of the window
        self._launch(plan.publish, plan.sms, args)

    def dispatch_call(self) -> DispatchCall:
        """Return the arguments of a dispatch of row descriptors."""
        published = PublishedOffsets(self._args.published, self._plan.pitch, self._args.received)
        return DispatchCall(
            self._request,
            (self._x, self._topk_idx),
            {**self._room, "sync": False, "descriptors": published},
        )

    def compute(self, routed: Routed) -> None:
        """Enqueue the launch that fetches rows, computes both GEMMs and sends the results."""
        args, given, plan = self._args, routed.args, self._plan
        args.owners, args.num_rows = given.route.token_owner, given.num_rows
        args.descriptors = routed.plan.base + given.out_x
        self._kept.append(routed)
        at_biases = [0, 0]
        for nth, bias in enumerate(self._biases):
            if bias is not None:
                self._kept.append(wide := bias.float())
                at_biases[nth] = wide.data_ptr()
        first, second = self._gemms(given.tokens_per_expert, *at_biases)
        schedule, clusters, row_bytes = plan.schedule, plan.clusters, plan.inner * plan.dtype.itemsize
        at = plan.scratch
        casts = (self._scratch + at.cast, self._scratch + at.cast_done, self._scratch + at.next_cast)
        more = (casts, plan.cast_rows) if plan.by_channel else ()
        whole = compute.layer_args(args, first, second, schedule, clusters, plan.together, row_bytes, *more)
        self._launch(plan.experts, clusters * schedule.cluster, whole)

    def _gemms(self, counts: int, *biases: int) -> tuple[ctypes.Structure, ctypes.Structure]:
        """Return the arguments of the two GEMMs, by addresses of the rows of each expert and of biases."""
        plan, (w13, w13_scales), (w2, w2_scales) = self._plan, self._w13, self._w2
        dtype, schedule, pitch = plan.dtype, plan.schedule, plan.pitch
        rows, product = self._scratch + plan.scratch.rows, self._scratch + plan.scratch.product
        cast = self._scratch + plan.scratch.cast if plan.by_channel else product
        row_scales = product_scales = None
        if w13_scales is not None and w2_scales is not None:
            made, made_pitch = self._scratch + plan.scratch.product_scales, plan.scratch.scales_pitch
            row_scales = (rows + plan.hidden, w13_scales.data_ptr(), made, pitch // 4, 1)  # at the end of a row
            product_scales = (made, w2_scales.data_ptr(), 0, made_pitch // 4, 1)
        shape, strides, at = (plan.max_rows, plan.hidden), (pitch // dtype.itemsize, 1), (rows, w13.data_ptr())
        first = gemm.arguments_at(
            *((*at, counts, product), shape, strides, dtype, w13.shape, row_scales, plan.apart, schedule),
            bias=biases[0],
            activation=self._activation,
            by_channel=plan.by_channel,
        )
        shape, at = (plan.max_rows, plan.inner), (cast, w2.data_ptr())
        second = gemm.arguments_at(
            *((*at, counts, 0), shape, None, dtype, w2.shape, product_scales, False, schedule),
            bias=biases[1],
            by_channel=plan.by_channel,
        )
        return first, second

    def prepare_reduce(self) -> None:
        """Load the kernel of the reduction."""
        load(self._reduce, self._rounds.device.index)

    def run_reduce(self) -> None:
        """Launch the reduction."""
        rounds, sms, flight = self._rounds, self._plan.sms, self._rounds.flight
        sharing = max(1, sms // self._session.most_blocks)
        # Blocks wait for peers: where ranks share a GPU, leave multiprocessors to the experts of the other ranks.
        blocks = sms if sharing == 1 else max(1, sms // (2 * sharing))
        kind = flight.kind("reduce", 0, rounds.dtype, rounds.hidden * rounds.dtype.itemsize)
        record = flight.begin(kind, self._args.num_tokens)
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
        session, index = self._session, self._rounds.device.index
        session.with_device(enqueue, index, kernel, blocks, args, session.exclusive_gpu)
