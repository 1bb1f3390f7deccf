"""What combines with the same options have in common: worked out for the first one, looked up for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moecomm import _native
from moecomm.combine.arguments import Tensors
from moecomm.core import packets, signature
from moecomm.core.settings import DTYPES
from moecomm.dispatch.arguments import LAYOUTS
from moecomm.errors import BadInput
from moecomm.routed import Handle

if TYPE_CHECKING:
    from moecomm.buffer import Buffer


class Options(NamedTuple):
    """What a caller of combine chooses, but for the tensors; with the layout of the dispatch."""

    layout: str
    dtype: torch.dtype
    weighted: bool
    wire: torch.dtype | None
    num_sms: int | None
    sum_grads: bool = False  # of flat rows: what every rank gives for a token is added up, not that of experts' owners


class Combining:
    """A combine that is ready to run, and what it hands out."""

    __slots__ = ("args", "back", "inputs", "out", "out_weight_grads", "plan", "reduced_rows")

    def __init__(
        self,
        plan: Plan,
        args: _native.CombineArgs,
        out: Any,
        out_weight_grads: torch.Tensor | None,
        reduced_rows: _native.Block | None,
    ) -> None:
        self.plan, self.args, self.reduced_rows = plan, args, reduced_rows
        self.out, self.out_weight_grads = out, out_weight_grads
        self.back: Any = None  # turns our tensors into the caller's kind of arrays; None: they are torch's
        self.inputs: Any = None  # alive until the executor has them


def kind_of(
    buffer: Buffer, y: torch.Tensor, bias: Any, weight_grads: Any, topk_weights: Any
) -> tuple[bool, bool, bool, bool]:
    """What plans with the same options differ in, but for the types of tensors: whether y is in our window, and what
    is given.
    """
    try:
        in_window = buffer.session.context.in_heap(y.data_ptr())
    except RuntimeError:  # it has no memory: sparse, say, which will be named
        in_window = False
    return in_window, bias is None, weight_grads is None, topk_weights is None


class Plan:
    """Combines with one set of options, for tensors of the types that `like` has."""

    def __init__(self, buffer: Buffer, options: Options, like: Tensors) -> None:
        self._options, self._hidden, self._topk = options, buffer.hidden, buffer.topk
        self._none = torch.empty(0, dtype=options.dtype, device=buffer.device)  # new_empty() is quicker than empty()
        self.kind = kind_of(buffer, like.y, like.bias, like.weight_grads, like.topk_weights)
        in_window = like.weight_grads is None and self.kind[0]
        flat = options.layout == "flat"
        self._stages_flat_rows = flat and not in_window
        row = buffer.hidden * (options.dtype if flat else options.wire or torch.float32).itemsize
        self._staged_bytes = 0 if like.weight_grads is not None else row
        self._room = buffer.packet_room
        # Rows that are reduced have a place each, if the window has room, so that they wait for no place in a ring.
        in_ring = not buffer.session.reduced_rows_in_heap or like.topk_weights is not None
        grads = 0 if like.weight_grads is None else buffer.settings.grads_bytes
        self._pitch = 0 if in_ring or (flat and in_window) else row + grads
        self._most_rows, self._memory = buffer.num_ranks * buffer.max_tokens, buffer.memory
        args = _args(buffer, options, like)
        self._native = _native.CombinePlan(args, like.y, like.bias, like.weight_grads, like.topk_weights)
        self._session = buffer.session
        self._few: dict[int, bool] = {}  # whether so many tokens come home in packets
        # What runs a combine, by its tokens: GPUs have other kernels for few.
        self._runs: dict[int, Callable[[_native.CombineArgs], None]] = {}

    def schedule(self, num_tokens: int) -> None:
        """Makes start() know how a round of so many tokens is run."""
        options = self._options
        few = self._staged_bytes > 0 and packets.fit_return_packets(
            self._staged_bytes, num_tokens, self._topk, self._room
        )
        self._few[num_tokens] = few
        # Flat rows that are staged take as many blocks as rows that are added up first.
        layout = "expert" if self._stages_flat_rows and not few else options.layout
        schedule = self._session.schedule("combine", num_tokens=num_tokens, layout=layout, num_sms=options.num_sms)
        self._native.schedule(num_tokens, schedule.workers, schedule.chunk_tokens)

    def _room_for_reduced_rows(self, handle: Handle) -> _native.Block | None:
        """None: they go through the ring, as they do where our own tokens are few; or nothing fits so many tokens."""
        if self._pitch == 0 or self._few.get(handle.args.num_tokens, True):
            return None
        rows = min(handle.args.max_rows, self._most_rows)
        try:
            (block,) = self._memory.allocate(rows * self._pitch)
        except BadInput:  # no room
            return None
        return block

    def start(
        self, handle: Handle, y: Any, out: Any, bias: Any, weight_grads: Any, topk_weights: Any
    ) -> Combining | None:
        """A combine that is ready to run; None unless these are tensors that the plan is for, and in order."""
        tokens = handle.args.num_tokens
        if out is None:
            out = self._none.new_empty(tokens, self._hidden)
        home = None
        if weight_grads is not None:
            home = self._none.new_empty(tokens, self._topk, dtype=torch.float32)
        reduced_rows = self._room_for_reduced_rows(handle)
        at = 0 if reduced_rows is None else handle.plan.base + reduced_rows.offset
        args = self._native.bind(handle.args, y, out, bias, weight_grads, home, at, topk_weights)
        if args is None:
            return None
        if tokens not in self._runs:
            self._runs[tokens] = self._session.combiner(args)
        return Combining(self, args, out, home, reduced_rows)

    def run(self, args: _native.CombineArgs) -> None:
        """Hands a combine to the executor."""
        self._runs[args.num_tokens](args)


def _args(buffer: Buffer, options: Options, like: Tensors) -> _native.CombineArgs:
    """All that is the same in every combine of a plan."""
    args = _native.CombineArgs()
    args.ctx = buffer.session.context
    args.hidden, args.type = buffer.hidden, DTYPES.index(options.dtype)
    args.bias_type = args.type if like.bias is None else DTYPES.index(like.bias.dtype)
    args.wire = DTYPES.index(options.wire or torch.float32)
    args.layout, args.weighted = LAYOUTS.index(options.layout), int(bool(options.weighted))
    args.sum_grads = int(options.sum_grads)
    args.call = signature.pack(
        layout=args.layout,
        dtype=args.type,
        wire=args.wire,
        weighted=args.weighted,
        weight_grads_given=int(like.weight_grads is not None),
        topk_weights_given=int(like.topk_weights is not None),
    )
    return args
