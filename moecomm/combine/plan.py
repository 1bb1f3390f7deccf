"""Plan: combines with the same options, for tensors of the same types."""

from __future__ import annotations

from typing import Any

import torch

from moecomm import _native
from moecomm.base import packets
from moecomm.base.choices import CAST_WIRES
from moecomm.base.protocol import DTYPES, LAYOUTS, TYPES
from moecomm.combine.arguments import Tensors
from moecomm.combine.in_window import reads_in_place
from moecomm.combine.options import Key, wire_dtype
from moecomm.dispatch.routed import Handle
from moecomm.dispatch.tables import table
from moecomm.errors import BadInput
from moecomm.gpu import used_rows
from moecomm.rounds import signature
from moecomm.rounds.rounds import Rounds


class Combining:
    """A combine that is ready to run, and its outputs."""

    __slots__ = ("args", "back", "check", "inputs", "out", "out_weight_grads", "plan", "reduced_rows")

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
        self.back: Any = None  # makes arrays of the caller's kind; None: of torch's
        self.inputs: Any = None  # kept until the executor has read them
        self.check: Any = None  # of a verified combine, until its kernel has been launched


class Plan:
    """Combines of one Key, for tensors of the types that `like` has."""

    def __init__(self, rounds: Rounds, key: Key, handle: Handle, like: Tensors) -> None:
        self._key, self._hidden, self._topk = key, rounds.hidden, rounds.topk
        self._none = torch.empty(0, dtype=key.dtype, device=rounds.device)  # new_empty() is quicker than empty()
        self.kind = self.kind_of(handle, like.y, like.out, like.bias, like.weight_grads, like.topk_weights)
        in_window = like.weight_grads is None and self.kind[0]
        flat = key.layout == "flat"
        self._unsummed = key.request.options.unsummed
        wire = wire_of(rounds, key)
        self._casts = wire in CAST_WIRES
        staged = key.dtype if flat and not self._casts else wire
        row = _native.staged_bytes(int(TYPES[staged]), rounds.hidden)
        self._row_bytes = 0 if like.weight_grads is not None else rounds.hidden * staged.itemsize
        in_place = self._unsummed or (in_window and reads_in_place(rounds, key.layout, key.request.options, key.dtype))
        self._stages_flat_rows = flat and not in_place
        one_domain = rounds.domain_ranks == rounds.num_ranks
        self._room = rounds.session.context.shape.packet_bytes if one_domain else 0
        # Rows that are reduced have a place each, if the window has room, so that they wait for no place in a ring.
        in_ring = not rounds.session.reduced_rows_in_heap or like.topk_weights is not None
        grads = 0 if like.weight_grads is None else rounds.settings.grads_bytes
        pitch = 0 if in_ring or in_place else row + grads
        self._memory = rounds.memory
        args = _args(rounds, key, like)
        self._peers_read_weights = (rounds.on_cpu or self._unsummed) and args.weighted == 1
        self._peers_read_weights &= not (flat or self._casts)
        self._peers_read_weights &= like.topk_weights is None
        self.native = _native.CombinePlan(args, like.y, like.bias, like.weight_grads, like.topk_weights)
        if self._unsummed and rounds.device.type == "cuda":
            used_rows.load(rounds.device.index, rounds.hidden * key.dtype.itemsize)  # for in_window.where_peers_read
        self._session = rounds.session
        self._expected_tokens = rounds.settings.expected_tokens
        self._flight = rounds.flight
        self._recorded = self._flight.kind("combine", args.call, key.dtype, rounds.hidden * key.dtype.itemsize)
        sizes = (pitch, rounds.num_ranks * rounds.max_tokens)
        self.native.prepare(self._recorded, *sizes, self._peers_read_weights, self._none, self._none.float())

    @staticmethod
    def kind_of(
        handle: Handle, y: torch.Tensor, out: Any, bias: Any, weight_grads: Any, topk_weights: Any
    ) -> tuple[bool, bool, bool, bool]:
        """Return whether y lies in this rank's window, and which tensors are given."""
        try:
            in_window = handle.rounds.session.context.in_heap(y.data_ptr())
        except RuntimeError:  # a sparse tensor, say, which has no memory: the checks will name it
            in_window = False
        return in_window, bias is None, weight_grads is None, topk_weights is None

    def schedule(self, num_tokens: int) -> None:
        key, expected = self._key, self._expected_tokens(num_tokens)
        few = self._row_bytes > 0 and not self._unsummed
        few = few and packets.fit_return_packets(self._row_bytes, expected, self._topk, self._room, scaled=self._casts)
        # Flat rows that are staged take as many blocks as rows that are added up first.
        layout = "expert" if self._stages_flat_rows and not few else key.layout
        schedule = self._session.schedule(
            "combine", num_tokens=expected, layout=layout, num_sms=key.request.options.num_sms, casts=self._casts
        )
        self.native.schedule(num_tokens, schedule.workers, schedule.chunk_tokens, few)

    def _room_for_reduced_rows(self, handle: Handle) -> _native.Block | None:
        """A place for each reduced row.  None: they go through the ring, as few tokens do, or there is no room."""
        if (nbytes := self.native.reduced_bytes(handle.args)) == 0:
            return None
        try:
            return self._memory.scratch(nbytes)
        except BadInput:  # no room
            return None

    def start(
        self, handle: Handle, y: Any, out: Any, bias: Any, weight_grads: Any, topk_weights: Any
    ) -> Combining | None:
        """A combine that is ready to run, or None if the plan is not for these tensors, or one can't be used."""
        tokens = handle.args.num_tokens
        if out is None:
            out = self._none.new_empty(tokens, self._hidden)
        grads = None
        if weight_grads is not None:
            grads = self._none.new_empty(tokens, self._topk, dtype=torch.float32)
        scratch = reduced_rows = self._room_for_reduced_rows(handle)
        at = 0 if reduced_rows is None else handle.plan.base + reduced_rows.offset
        args = self.native.bind(handle.args, y, out, bias, weight_grads, grads, at, topk_weights)
        if args is None:
            return None
        outside = self._unsummed or type(handle.block) is not _native.Block  # the tables may be
        if outside and self._peers_read_weights and not args.ctx.in_heap(args.route.row_weights):
            scratch, args.route.row_weights = self._weights_in_window(handle)
        if not self.native.loaded(tokens):  # GPUs have other kernels for few
            self.native.load(tokens, self._session.combiner(args))
        return Combining(self, args, out, grads, scratch)

    def _weights_in_window(self, handle: Handle) -> tuple[_native.Block, int]:
        """Return a copy of the weights of rows, and its address.  Ranks that read rows in place read them, too."""
        shape = handle.plan.rows_shape(handle.args)
        weights = table(handle, handle.args.route.row_weights, shape, torch.float32)
        block = self._memory.scratch(weights.nbytes)
        return block, handle.rounds.copy_to(block, weights).data_ptr()

    def run(self, args: _native.CombineArgs) -> None:
        """Run a combine on the executor."""
        record = self.record(args)
        self.native.run(args)
        self._flight.end(record)

    def record(self, args: _native.CombineArgs) -> int:
        """Enter a call into the flight recorder; return its number there."""
        return self._flight.begin(self._recorded, args.num_tokens)


def wire_of(rounds: Rounds, key: Key) -> torch.dtype:
    """Return the dtype of a reduced row on the wire."""
    return wire_dtype(key.request.options.wire or rounds.settings.wire, key.dtype)


def _args(rounds: Rounds, key: Key, like: Tensors) -> _native.CombineArgs:
    """The arguments that all combines of a plan share."""
    request = key.request
    options = request.options
    args = _native.CombineArgs()
    args.ctx = rounds.session.context
    args.hidden, args.type = rounds.hidden, DTYPES.index(key.dtype)
    args.bias_type = args.type if like.bias is None else DTYPES.index(like.bias.dtype)
    args.wire = int(TYPES[wire_of(rounds, key)])
    args.layout, args.weighted = LAYOUTS.index(key.layout), int(bool(options.weighted))
    args.unsummed = int(options.unsummed)
    args.sum_grads = int(request.sum_grads)
    one_domain = args.ctx.shape.domain_ranks in (0, rounds.num_ranks)
    args.bias_first = int(request.bias_first and like.bias is not None and one_domain)
    args.call = signature.pack(
        "combine",
        layer=request.layer,
        call=signature.COMBINES.index(request.call),
        layout=args.layout,
        dtype=args.type,
        wire=signature.ROWS_WIRE if options.unsummed else args.wire,
        weighted=args.weighted,
        weight_grads_given=int(like.weight_grads is not None),
        topk_weights_given=int(like.topk_weights is not None),
        gradients_wanted=int(request.gradients),
    )
    return args
