"""Handles made of tensors, strings and numbers, and their conversion to the native handles that rounds take.

A dispatch leaves its route and counts, for combines and repeats, in one block of memory.  A handle holds that block as
a tensor, so the block lives as long as a reference, for example from an autograd graph.  The tables contain no
addresses, so a copy at another address, for example one that was offloaded and loaded again, works as well.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from moecomm import _native
from moecomm.base.arrays import check_memory, shown_tensors
from moecomm.base.choices import Layout
from moecomm.base.protocol import LAYOUTS
from moecomm.dispatch.routed import Handle as NativeHandle
from moecomm.dispatch.tables import begin, moved
from moecomm.errors import BadInput, Unsupported
from moecomm.rounds import names
from moecomm.rounds.rounds import Part, Rounds
from moecomm.rounds.state import CollectiveCall

if TYPE_CHECKING:
    from moecomm.dispatch.routed import DispatchPlan, Routed

_Tuple = TypeVar("_Tuple", bound="NamedTuple")
_MOST_MOVED = 16
_ALIGNMENT = 16  # bytes, of the tables


class Handle(NamedTuple):
    """The route of one dispatch, for any number of combines and repeats in any order.

    Attributes:
        memory: uint8 `[n]`: the tables of the dispatch.  May be copied, must not be changed.
        row_weights: float32 `[rows]` (batched `[E/R, rows]`): factors of the rows in combine, through which the
            gradient of the routing weights flows; None in "flat".
        buffer: the Buffer's name.
        layout: of the dispatch.
        num_tokens: tokens that this rank dispatched.
        max_rows: rows that the dispatch made room for.
        zero_padding: rows without a token are zeros, also in gradients.
        num_sms: of rounds with this handle.
        graph: `[0]`, through which the backward pass of a combine leads to those of the dispatch and its repeats, also
            on a rank whose `y` does not depend on their rows.  `handle._replace(graph=None)`: it does not, for a handle
            that several backward passes use, or stages whose backward passes are run one by one.
        layer: number of the layer, which round headers carry; 0: it has none.
    """

    memory: torch.Tensor
    row_weights: torch.Tensor | None
    buffer: str
    layout: Layout
    num_tokens: int
    max_rows: int
    zero_padding: bool
    num_sms: int | None = None
    graph: torch.Tensor | None = None
    layer: int = 0

    def __repr__(self) -> str:
        return shown_tensors("moecomm.ops.Handle", self._asdict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return deep_copied(self, memo)


def deep_copied(given: _Tuple, memo: dict[int, Any]) -> _Tuple:
    """Return a copy of a NamedTuple with tensors.

    Raises:
        Unsupported: a tensor is part of an autograd graph, which a copy would not be.
    """
    for name, value in given._asdict().items():
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            kind = type(given).__name__
            raise Unsupported(
                f"a deep copy of a {kind} whose {name} has a gradient: replace it by {name}.detach() first"
            )
    return type(given)(*copy.deepcopy(tuple(given), memo))


class Route(NamedTuple):
    """A dispatch whose table offsets hold for all dispatches with the same layout, max_rows and number of tokens."""

    plan: DispatchPlan
    args: _native.DispatchArgs
    address: int  # of the tables that `args` points to
    memory_bytes: int
    moved: dict[int, _native.DispatchArgs]  # args for tables at other addresses, by address


class Routes(Part):
    """The routes of a Buffer by layout, max_rows and number of tokens."""

    def __init__(self) -> None:
        self.by_kind: dict[tuple[str, int, int], Route] = {}

    def close(self) -> None:
        self.by_kind.clear()


def remember(rounds: Rounds, routed: Routed) -> Route:
    """Record the route of a dispatch, so that restore() accepts handles of dispatches like it."""
    args = routed.handle.args
    key = (routed.plan.layout, args.max_rows, args.num_tokens)
    routes = rounds.parts.get(Routes)
    if not isinstance(routes, Routes):
        routes = rounds.add(Routes())
    route = routes.by_kind.get(key)
    if route is None:
        address = begin(routed.handle)
        size = memory_bytes(rounds, routed.plan.layout, args.max_rows)
        route = routes.by_kind[key] = Route(routed.handle.plan, copy.copy(args), address, size, {})
    return route


def restore(memory: torch.Tensor, name: str, layout: str, max_rows: int, num_tokens: int) -> NativeHandle:
    """Return a native handle for Buffer's rounds over the tables in `memory`.

    Raises:
        Closed: the Buffer is closed.
        BadInput: no dispatch of this Buffer made such a handle.  The contents of the tables are checked in the round,
            on every rank (csrc/host/seal.h).
    """
    rounds = names.find(name)
    routes = rounds.parts.get(Routes)
    route = routes.by_kind.get((layout, max_rows, num_tokens)) if isinstance(routes, Routes) else None
    right = memory.dtype is torch.uint8 and memory.is_contiguous() and memory.device == rounds.device
    if route is not None and not (right and memory.numel() == route.memory_bytes):
        route = None
    args = None
    if route is not None and _native.tensor_words((memory,)) is not None:
        args = route.moved.get(memory.data_ptr())
    if route is None or args is None:
        with CollectiveCall(rounds):  # every caller runs a round with the handle
            route, args = _checked(memory, route, layout, max_rows, num_tokens)
    # The tensor stands in for a block of the window: rounds only need it to keep the tables alive.
    return NativeHandle(rounds, route.plan, args, cast("_native.Block", memory))


def _checked(
    memory: torch.Tensor, route: Route | None, layout: str, max_rows: int, num_tokens: int
) -> tuple[Route, _native.DispatchArgs]:
    """Return the route of such tables, and its arguments for where they lie.  Raises BadInput."""
    if route is None:
        got = f"one of layout {layout!r} for {num_tokens} tokens and {max_rows} rows on {memory.device}"
        raise BadInput("handle", got, "one that moecomm.ops.dispatch returned, over this Buffer")
    check_memory("handle", memory)
    address = memory.data_ptr()
    if address % _ALIGNMENT:
        raise BadInput("handle", f"a copy at 0x{address:x}", f"one at a multiple of {_ALIGNMENT} bytes")
    args = route.moved.get(address)
    if args is None:
        if len(route.moved) >= _MOST_MOVED:  # allocators reuse addresses, so few are needed
            route.moved.clear()
        args = route.moved[address] = moved(route.args, address - route.address)
    return route, args


def counts(handle: NativeHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens_per_expert int32 [E/R] and num_rows int32 [1], views of the tables of a handle from restore()."""
    args = handle.args
    experts = _view(handle, args.tokens_per_expert, (handle.plan.local_experts,))
    return experts, _view(handle, args.num_rows, (1,))


def sources(handle: NativeHandle) -> torch.Tensor:
    """Return src int32 [rows, 2] (batched [E/R, rows, 2]), a view; rows from num_rows on are not initialized."""
    return _view(handle, handle.args.route.src, (*handle.plan.rows_shape(handle.args), 2))


def tokens_sent(handle: Handle, ranks: int) -> torch.Tensor:
    """Return the number of tokens that each source rank passed to a dispatch: int32 [R], a view."""
    restored = restore(handle.memory, handle.buffer, handle.layout, handle.max_rows, handle.num_tokens)
    return _view(restored, restored.args.route.sent, (ranks, 2))[:, 0]


def row_weights(handle: NativeHandle) -> torch.Tensor:
    """Return the routing weight of each row, float32 [rows] (batched [E/R, rows]), a view."""
    weights = _view(handle, handle.args.route.row_weights, handle.plan.rows_shape(handle.args))
    return weights.view(torch.float32)


def memory_bytes(rounds: Rounds, layout: str, max_rows: int) -> int:
    """Return the bytes of the tables of a dispatch with room for `max_rows` rows."""
    args = _native.DispatchArgs()
    args.ctx = rounds.session.context
    args.layout, args.idx_bytes = LAYOUTS.index(layout), 8
    return _native.DispatchPlan(args, False, None, None, None, None).kept_bytes(max_rows)


def _view(handle: NativeHandle, address: int, shape: tuple[int, ...]) -> torch.Tensor:
    memory = cast("torch.Tensor", handle.block)
    strides = (*(math.prod(shape[d:]) for d in range(1, len(shape))), 1)
    return memory.view(torch.int32).as_strided(shape, strides, (address - memory.data_ptr()) // 4)
