"""Plan: dispatches with the same options, for tensors of the same types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moecomm import _native
from moecomm.base import formats
from moecomm.base.protocol import DESCRIPTOR_BYTES, LAYOUTS, REPLICATED, SCALE_FORMATS, TYPES
from moecomm.base.validation import is_integer
from moecomm.dispatch import growth, outputs
from moecomm.dispatch.arguments import Tensors, scale_columns, scale_dtype, travel_as_bytes
from moecomm.dispatch.options import SCALE_LAYOUTS, Gradients, Key
from moecomm.dispatch.routed import BEGIN, END, WHOLE, DispatchPlan, Handle, Routed
from moecomm.gpu import used_rows
from moecomm.rounds import signature
from moecomm.rounds.rounds import Rounds


class Plan(DispatchPlan):
    """Dispatches of one Key, for tensors of the types that `like` has."""

    def __init__(self, rounds: Rounds, key: Key, like: Tensors) -> None:
        self._session = session = rounds.session
        self._expected_tokens = rounds.settings.expected_tokens
        self.layout, self._request, self._is_layer = key.layout, key.request, key.request.row_descriptors
        self.device, self.owner = session.device, session.owner
        self.base = session.context.peers[rounds.rank]
        self.topk, self.local_experts = rounds.topk, len(rounds.local_experts)
        self._groups = self.local_experts if key.layout == "batched" else 1  # with as many rows each
        options = key.request.options
        sizes = (key.layout, options.expert_alignment)
        self._worst_rows = rounds.settings.worst_rows(*sizes, rank=rounds.rank)
        self._rows = rounds.settings.capacity_rows(*sizes, rank=rounds.rank)
        self._memory = rounds.memory
        self.kind = like.x.dtype
        as_bytes = travel_as_bytes(options, like.x)
        values = torch.float8_e4m3fn if options.quantize else like.x.dtype
        self.x_dtype = torch.uint8 if as_bytes else values
        self.scales_dtype = scale_dtype(options, like)
        args = _args(rounds, key, like)
        by_column = options.scale_layout == "column" and not as_bytes
        self.native = _native.DispatchPlan(args, by_column, like.x, like.scales, like.topk_idx, like.topk_weights)
        self._run_end: Callable[[_native.DispatchArgs], None] | None = None
        self._flight = flight = rounds.flight
        recorded = (args.call, self.x_dtype, args.row_bytes + args.scale_bytes)
        self._recorded = flight.kind("dispatch_begin" if key.request.begin else "dispatch", *recorded)
        self._recorded_end = flight.kind("dispatch_end", *recorded) if key.request.begin else self._recorded
        settings = rounds.settings
        rows_of_all = max(settings.capacity_rows(*sizes, rank=rank) for rank in range(settings.ranks))
        by_default = settings.window_bytes is None and rows_of_all <= settings.largest_rows
        self.native.prepare(self._recorded, self._rows, self._worst_rows, self._groups, rows_of_all, by_default)

    @staticmethod
    def kind_of(rounds: Rounds, x: Any, *others: Any) -> object:
        return getattr(x, "dtype", None)

    def schedule(self, num_tokens: int) -> None:
        expected = self._expected_tokens(num_tokens)
        schedule = self._session.schedule(
            "dispatch", num_tokens=expected, layout=self.layout, num_sms=self._request.options.num_sms
        )
        self.native.schedule(num_tokens, schedule.workers, schedule.chunk_tokens)

    def start(
        self,
        rounds: Rounds,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        scales: Any,
        max_rows: int | None,
        handle: Handle | None,
        global_scale: float | torch.Tensor | None,
    ) -> Routed | None:
        """A dispatch that is ready to run, or None if the plan is not for these tensors, or one can't be used.

        `global_scale`: see payloads.Packed.
        """
        if max_rows is not None and not (is_integer(max_rows) and 0 <= max_rows < 1 << 63):
            return None
        if handle is not None:
            payload = self._room_to_repeat(rounds, handle)
            args = self.native.repeat(payload, handle.args, x, scales)
        else:
            rows = self._rows
            if max_rows is not None:
                rows = min(max_rows * self._groups, self._worst_rows)
            sizes = self.native.kept_bytes(rows), self.native.payload_bytes(rows)
            if self._is_layer:  # a layer frees them before its call returns
                kept, payload = map(self._memory.scratch, sizes)
            else:
                if max_rows is None or self.native.always_agrees:
                    self._agree(rounds, self.native.largest_bytes)
                kept, payload = growth.room(rounds, sum(sizes), partial(self._memory.allocate, *sizes))
            args = self.native.bind(payload, kept, rows, x, scales, topk_idx, topk_weights)
        if args is None:
            return None
        if isinstance(global_scale, torch.Tensor):
            args.compared = global_scale.data_ptr()
        elif global_scale is not None:
            args.call ^= signature.scale_word(global_scale)
        if not self.native.loaded(args.num_tokens):
            self._load(args)
        if handle is None:
            handle = Handle(rounds, self, args, kept)
        return Routed(handle, self, args, payload)

    def _room_to_repeat(self, rounds: Rounds, handle: Handle) -> _native.Block:
        first: Any = handle.plan
        # The dispatch was without `max_rows` on this rank, so on the others as well.
        if self.native.always_agrees or handle.args.route.max_rows == first.native.rows:
            self._agree(rounds, self.native.largest_payload_bytes(first.native.rows_of_all))
        nbytes = self.native.payload_bytes(handle.args.max_rows)
        return growth.room(rounds, nbytes, partial(self._memory.rows, nbytes))

    def _agree(self, rounds: Rounds, nbytes: int) -> None:
        """Make room on all ranks for a round of so many bytes, as all ranks find it."""
        if nbytes > self._memory.parts.agreed:
            growth.grow(rounds, nbytes)

    def run(self, args: _native.DispatchArgs) -> None:
        """Run a dispatch, or half of one, on the executor."""
        run = self._run_end if args.part == END else self.native.run
        assert run is not None, "start() was there first"
        record = self.record(args)
        run(args)
        self._flight.end(record)

    def record(self, args: _native.DispatchArgs) -> int:
        """Enter a call into the flight recorder; return its number there."""
        return self._flight.begin(self._recorded_end if args.part == END else self._recorded, args.num_tokens)

    def _load(self, args: _native.DispatchArgs) -> None:
        """Ask the session for the function that runs dispatches with as many tokens."""
        # GPUs have other kernels for few tokens.
        self.native.load(args.num_tokens, self._session.dispatcher(args))
        if self.device.type == "cuda" and not self._is_layer:
            used_rows.load(self.device.index, args.row_bytes)
        if self._request.begin:
            end = copy.copy(args)
            end.part = END
            self._run_end = self._session.dispatcher(end)

    def trim(self, routed: Routed, rows: int) -> None:
        """Free the memory of rows that did not arrive.  Before the first tensor of rows is made."""
        args, payload = routed.args, routed.payload
        args.max_rows = rows
        if routed.handle.args is not args:  # its tables have moved
            routed.handle.args.max_rows = rows
        if payload.nbytes > 0:
            payload.shrink(max(1, args.out_x - payload.offset + rows * args.row_bytes))

    def tensor(self, name: str, routed: Routed[Any, Any, Any, Any]) -> torch.Tensor | None:
        return outputs.MAKE[name](routed)

    def rows_tensor(self, routed: Routed) -> torch.Tensor:
        return self.native.rows_output(routed.args, routed.payload, self.owner)

    def flat_tensors(self, routed: Routed) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        if type(routed.handle.block) is not _native.Block:
            return super().flat_tensors(routed)
        return self.native.flat_outputs(routed.args, routed.payload, routed.handle.block, self.owner)

    def expert_tensors(self, routed: Routed, *, counted: bool = False) -> tuple[Any, ...]:
        if type(routed.handle.block) is not _native.Block:
            return super().expert_tensors(routed, counted=counted)
        return self.native.expert_outputs(routed.args, routed.payload, routed.handle.block, self.owner, counted)

    def layer_tensors(self, routed: Routed) -> tuple[Any, ...]:
        if type(routed.handle.block) is not _native.Block:
            return super().layer_tensors(routed)
        return self.native.layer_outputs(routed.args, routed.payload, routed.handle.block, self.owner)

    def batched_tensors(self, routed: Routed, *, scaled: bool = False) -> tuple[Any, ...]:
        if type(routed.handle.block) is not _native.Block:
            return super().batched_tensors(routed, scaled=scaled)
        found = self.native.batched_outputs(routed.args, routed.payload, routed.handle.block, self.owner)
        return (*found, outputs.scales(routed)) if scaled else found

    def table_tensors(self, routed: Routed) -> tuple[Any, ...]:
        if type(routed.handle.block) is not _native.Block:
            return super().table_tensors(routed)
        return self.native.table_outputs(routed.handle.args, routed.handle.block, self.owner)

    def rows_shape(self, args: _native.DispatchArgs) -> tuple[int, ...]:
        rows = args.max_rows // self._groups
        return (self._groups, rows) if self.layout == "batched" else (rows,)


def _args(rounds: Rounds, key: Key, like: Tensors) -> _native.DispatchArgs:
    """The arguments that all dispatches of a plan share."""
    request = key.request
    options = request.options
    args = _native.DispatchArgs()
    args.ctx = rounds.session.context
    if request.replicates:
        args.ctx.placed = REPLICATED
    raw, as_bytes = like.x.dtype is torch.uint8, travel_as_bytes(options, like.x)
    args.hidden = like.x.shape[1] if raw else rounds.hidden
    args.in_type = TYPES[torch.float8_e4m3fn if raw else like.x.dtype]
    args.layout, args.alignment = LAYOUTS.index(key.layout), options.expert_alignment
    args.quantize = 0 if raw else signature.QUANTIZED.index(options.quantize)
    args.row_bytes = args.hidden * like.x.element_size()
    if request.row_descriptors:
        args.row_bytes = DESCRIPTOR_BYTES
    elif options.quantize is not None and not raw:
        args.row_bytes = formats.FORMATS[options.quantize].row_bytes(args.hidden)
    args.descriptors = int(request.row_descriptors)
    args.scale_format = 0 if as_bytes else SCALE_FORMATS.index(options.scale_format)
    args.check_weights, args.repeat = int(bool(options.check_weights)), int(key.repeat)
    args.part = BEGIN if request.begin else WHOLE
    if like.topk_idx is not None:
        args.idx_bytes = like.topk_idx.element_size()
    x_dtype, dtype = like.x.dtype, scale_dtype(options, like)
    if dtype is not None:
        args.scale_bytes = scale_columns(options, like) * dtype.itemsize
    compared, row_bytes, scale_bytes = dict(request.experts), args.row_bytes, args.scale_bytes
    if as_bytes:
        assert key.payload is not None, "pack() has made these rows"
        x, scales, compared["extras"] = key.payload.compared
        x_dtype, row_bytes = x.dtype, x.nbytes
        dtype, scale_bytes = (None, 0) if scales is None else (scales.dtype, scales.nbytes)
    args.call = signature.pack(
        "payload" if as_bytes else "dispatch",
        compared,
        layer=request.layer,
        call=key.described(),
        layout=args.layout,
        dtype=signature.index_of(signature.ROW_DTYPES, x_dtype),
        scales=signature.index_of(signature.SCALE_DTYPES, dtype),
        topk_idx_dtype=int(args.idx_bytes == 8),
        quantize=request.quantized(),
        scale_layout=SCALE_LAYOUTS.index(options.scale_layout),
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        expert_alignment=args.alignment,
        handle_given=args.repeat,
        asks_for_a_larger_buffer=int(request.grow),
        gradients_wanted=int(request.gradients is not Gradients.NONE),
        weight_grads_given=int(request.gradients is Gradients.WEIGHTS),  # by the backward pass
        balance=int(request.replicates),
    )
    return args
