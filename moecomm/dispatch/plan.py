"""What dispatches with the same options have in common: worked out for the first one, looked up for the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moecomm import _native
from moecomm.core import signature
from moecomm.core.choices import Layout
from moecomm.core.integers import is_integer
from moecomm.dispatch import outputs
from moecomm.dispatch.arguments import LAYOUTS, SCALE_FORMATS, SCALE_LAYOUTS, Tensors, scale_columns, scale_dtype
from moecomm.routed import Handle, Routed

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}  # Type in args.h
WHOLE, BEGIN, END = 0, 1, 2  # Part in args.h
DESCRIPTOR_BYTES = 16  # RowDescriptor in slip.h


class Options(NamedTuple):
    """What a caller chooses, but for the tensors and max_rows; a repeat has the layout of its handle."""

    layout: Layout
    expert_alignment: int = 1
    quantize: str | None = None
    scale_format: str = "fp32"
    scale_layout: str = "row"
    num_sms: int | None = None
    check_weights: bool = False
    begin: bool = False
    repeat: bool = False
    descriptors: bool = False  # they travel in the place of rows


class PublishedRows(NamedTuple):
    """Offsets in our window of the rows of x that owners fetch and of the rows that experts return.

    csrc/protocol/row_descriptor.h has the descriptor that carries them.
    """

    rows: int
    pitch: int  # bytes from one of them to the next
    receive_buffer: int  # room for `[T, K, H]` of x's dtype


class Plan:
    """Dispatches with one set of options, for tensors of the types that `like` has."""

    def __init__(self, buffer: Buffer, options: Options, like: Tensors) -> None:
        self._session = session = buffer.session
        self.layout, self._options = options.layout, options
        self.device, self.owner = session.device, session.owner
        self.base = session.context.peers[buffer.rank]
        self.topk, self.local_experts = buffer.topk, buffer.num_experts // buffer.num_ranks
        self._groups = self.local_experts if options.layout == "batched" else 1  # with as many rows each
        self._worst_rows = buffer.settings.worst_rows(options.layout, options.expert_alignment)
        self._memory = buffer.memory
        self.type_given = like.x.dtype
        self.x_dtype = torch.float8_e4m3fn if options.quantize else like.x.dtype
        self.scales_dtype = scale_dtype(options, like)
        args = _args(buffer, options, like)
        by_column = options.scale_layout == "column"
        self._native = _native.DispatchPlan(args, by_column, like.x, like.scales, like.topk_idx, like.topk_weights)
        # What runs a dispatch, by its tokens: GPUs have other kernels for few.
        self._runs: dict[int, Callable[[_native.DispatchArgs], None]] = {}
        self._run_end: Callable[[_native.DispatchArgs], None] | None = None

    def schedule(self, num_tokens: int) -> None:
        """Makes start() know how a round of so many tokens is run."""
        schedule = self._session.schedule(
            "dispatch", num_tokens=num_tokens, layout=self.layout, num_sms=self._options.num_sms
        )
        self._native.schedule(num_tokens, schedule.workers, schedule.chunk_tokens)

    def start(
        self,
        buffer: Buffer,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        scales: Any,
        max_rows: int | None,
        handle: Handle | None,
    ) -> Routed | None:
        """A dispatch that is ready to run; None unless these are tensors that the plan is for, and in order."""
        ended = not self._options.begin
        if handle is not None:
            (payload,) = self._memory.allocate(self._native.payload_bytes(handle.args.max_rows))
            args = self._native.repeat(payload, handle.args, x, scales)
        else:
            rows = self._worst_rows
            if max_rows is not None:
                if not is_integer(max_rows) or not 0 <= max_rows < 1 << 63:
                    return None
                rows = min(max_rows * self._groups, rows)
            # `kept` lives longer: in front, it does not cut the range that `payload` gives back.
            kept, payload = self._memory.allocate(self._native.kept_bytes(rows), self._native.payload_bytes(rows))
            args = self._native.bind(payload, kept, rows, x, scales, topk_idx, topk_weights)
        if args is None:
            return None
        if args.num_tokens not in self._runs:
            self._load(args)
        if handle is None:
            handle = Handle(buffer, self, args, kept, ended)
        return Routed(handle, self, args, payload, ended)

    def run(self, args: _native.DispatchArgs) -> None:
        """Hands a dispatch, or the half of one, to the executor."""
        run = self._run_end if args.part == END else self._runs[args.num_tokens]
        assert run is not None, "start() was there first"
        run(args)

    def _load(self, args: _native.DispatchArgs) -> None:
        """Finds what runs the dispatches of this plan that are like this one."""
        self._runs[args.num_tokens] = self._session.dispatcher(args)
        if self._options.begin:
            end = copy.copy(args)
            end.part = END
            self._run_end = self._session.dispatcher(end)

    def trim(self, routed: Routed, rows: int) -> None:
        """Gives back the memory of the rows that did not come.  Before the first tensor of rows is made."""
        args, payload = routed.args, routed.payload
        args.max_rows = rows
        if payload.nbytes > 0:
            payload.shrink(max(1, args.out_x - payload.offset + rows * args.row_bytes))

    def tensor(self, name: str, routed: Routed[Any, Any, Any, Any]) -> torch.Tensor | None:
        """A tensor of Routed, by its name there."""
        return outputs.MAKE[name](routed)

    def flat_tensors(self, routed: Routed) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """x, scales, topk_idx and topk_weights of a flat dispatch, in one step.  Scales were given, and go by row."""
        return self._native.flat_outputs(routed.args, routed.payload, routed.handle.block, self.owner)

    def expert_tensors(self, routed: Routed, *, counted: bool = False) -> tuple[Any, ...]:
        """x, scales and row_weights of rows of experts, likewise; `counted`: and rows_per_expert."""
        return self._native.expert_outputs(routed.args, routed.payload, routed.handle.block, self.owner, counted)

    def batched_tensors(self, routed: Routed) -> tuple[torch.Tensor, torch.Tensor]:
        """x and tokens_per_expert of a batched dispatch, in one step, before or after it has arrived."""
        return self._native.batched_outputs(routed.args, routed.payload, routed.handle.block, self.owner)

    def rows_shape(self, args: _native.DispatchArgs) -> tuple[int, ...]:
        """`[rows]`, or `[E/R, rows of each]` (batched): what the shapes of outputs begin with."""
        rows = args.max_rows // self._groups
        return (self._groups, rows) if self.layout == "batched" else (rows,)


def _args(buffer: Buffer, options: Options, like: Tensors) -> _native.DispatchArgs:
    """All that is the same in every dispatch of a plan."""
    args = _native.DispatchArgs()
    args.ctx = buffer.session.context
    args.hidden, args.in_type = buffer.hidden, TYPES[like.x.dtype]
    args.layout, args.alignment = LAYOUTS.index(options.layout), options.expert_alignment
    args.row_bytes = (
        DESCRIPTOR_BYTES if options.descriptors else args.hidden * (1 if options.quantize else like.x.element_size())
    )
    args.descriptors = int(options.descriptors)
    args.quantize = int(options.quantize is not None)
    args.scale_format = SCALE_FORMATS.index(options.scale_format)
    args.check_weights, args.repeat = int(bool(options.check_weights)), int(options.repeat)
    args.part = BEGIN if options.begin else WHOLE
    if like.topk_idx is not None:
        args.idx_bytes = like.topk_idx.element_size()
    if (dtype := scale_dtype(options, like)) is not None:
        args.scale_bytes = scale_columns(options, like) * dtype.itemsize
    args.call = signature.pack(
        layout=args.layout,
        dtype=args.in_type,
        topk_idx_dtype=int(args.idx_bytes == 8),
        quantize=args.quantize,
        scale_format=args.scale_format,
        scale_layout=SCALE_LAYOUTS.index(options.scale_layout),
        bytes_of_a_row_of_scales=args.scale_bytes,
        expert_alignment=args.alignment,
        handle_given=args.repeat,
        in_two_halves=int(options.begin),
        rows_that_are_fetched=args.descriptors,
    )
    return args
