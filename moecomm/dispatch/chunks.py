"""Dispatches whose rows have no room in the window: tokens go in chunks, rows to their places outside of the window.

The rows, their order and their bits are those of one round.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.choices import Layout
from moecomm.dispatch.arguments import is_cast_to_bytes, travel_as_bytes
from moecomm.dispatch.options import Options
from moecomm.dispatch.outputs import as_bytes
from moecomm.dispatch.routed import Chunk, ChunkedHandle, DispatchPlan, Handle, Routed
from moecomm.dispatch.tables import in_window, over, tables_of
from moecomm.errors import TooManyRows
from moecomm.rounds.rounds import Rounds

_Result = TypeVar("_Result")
_BY_ROW = ("x", "scales", "topk_idx", "topk_weights", "row_weights")
_NO_ROW = {"topk_idx": -1, "src": -1}  # in padding; else 0


def in_parts(tokens: int, max_tokens: int, one: Callable[[slice], _Result]) -> Iterator[tuple[slice, _Result]]:
    """Do a call for parts of the tokens, in order, and yield what it returns for each.

    All ranks see the same error when a rank has too little room.  So they split their tokens alike, by index, and split
    a part again that is still too large.

    Args:
        tokens: of this rank.
        max_tokens: the most that a rank has.
        one: does the call for some tokens.  It waits for their rows and raises the error of its own round.  On GPUs a
            call that does not wait leaves its error to the next one, and the wrong part would be split.

    Raises:
        TooManyRows: there is no room for one token of each rank.
    """
    waiting = [(1, 2), (0, 2)]  # (i, n): the i-th of n parts; the next is the last
    while waiting:
        part, parts = waiting.pop()
        span = slice(tokens * part // parts, tokens * (part + 1) // parts)
        try:
            done = one(span)
        except TooManyRows:
            if parts > max_tokens:
                raise
            waiting += [(2 * part + 1, 2 * parts), (2 * part, 2 * parts)]
            continue
        yield span, done
        del done  # frees its memory for the next


class Whole(DispatchPlan):
    """The outputs of all chunks: the DispatchPlan of a Routed whose tensors are there already."""

    def __init__(self, like: DispatchPlan, rows: tuple[int, ...], tensors: dict[str, torch.Tensor | None]) -> None:
        self.layout, self.base, self.topk, self.local_experts = like.layout, like.base, like.topk, like.local_experts
        self.x_dtype, self.scales_dtype = like.x_dtype, like.scales_dtype
        self.device, self.owner = like.device, like.owner
        self._rows, self._tensors = rows, tensors

    def rows_shape(self, args: _native.DispatchArgs) -> tuple[int, ...]:
        return self._rows

    def run(self, args: _native.DispatchArgs) -> None:
        raise AssertionError("the rounds of the chunks have run")

    def record(self, args: _native.DispatchArgs) -> int:
        raise AssertionError("each chunk has its record")

    def trim(self, routed: Any, rows: int) -> None:
        pass

    def tensor(self, name: str, routed: Any) -> torch.Tensor | None:
        return self._tensors[name]

    def repeated(self, like: DispatchPlan, rows: dict[str, torch.Tensor | None]) -> Whole:
        """Return the outputs of a repeated dispatch: new x and scales, and the tables of the first."""
        whole = Whole(self, self._rows, {**self._tensors, **_typed(rows, like)})
        whole.x_dtype, whole.scales_dtype = like.x_dtype, like.scales_dtype
        return whole


def _typed(rows: dict[str, torch.Tensor | None], like: DispatchPlan) -> dict[str, torch.Tensor | None]:
    """Give rows and scales, which may be bytes, their types."""
    x, scales = rows["x"], rows["scales"]
    assert x is not None
    typed = None if scales is None or like.scales_dtype is None else scales.view(like.scales_dtype)
    return {"x": x.view(like.x_dtype), "scales": typed}


class _CopiedChunk(NamedTuple):
    """A chunk that has arrived, copied out of the window."""

    tokens: slice  # of this rank
    handle: Handle
    tensors: dict[str, torch.Tensor | None]  # of the rows that hold a token
    per_expert: torch.Tensor  # int32 [E/R]
    rows: torch.Tensor  # int64 [n]: these rows
    group: torch.Tensor  # int64 [n]: expert, or 0
    src: torch.Tensor  # int32 [n, 2]
    sent: torch.Tensor  # int32 [R]: tokens of each source rank


def dispatch(
    rounds: Rounds,
    options: Options,
    tokens: int,
    one: Callable[[slice], Routed],
) -> Routed:
    """Dispatch in as many rounds as it takes.

    Args:
        rounds, options: of the dispatch.
        tokens: of this rank.
        one: dispatches some of them, and waits for their rows.

    Raises:
        TooManyRows: there is no room for one token of each rank.
    """
    copied = in_parts(tokens, rounds.max_tokens, lambda span: _copied(one(span), span))
    return _whole(rounds, options, [chunk for _, chunk in copied], tokens)


def scales_of(options: Options, x: torch.Tensor, scales: torch.Tensor | None, tokens: slice) -> torch.Tensor | None:
    """Return the scales of some tokens; all have the same global scale."""
    return scales if scales is None or is_cast_to_bytes(options, x) else scales[tokens]


def repeat(
    options: Options,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    handle: ChunkedHandle,
    one: Callable[..., Routed],
) -> Routed:
    """Dispatch other rows like an earlier dispatch in chunks.  `one` does so for one chunk."""
    by_column = options.scale_layout == "column" and not travel_as_bytes(options, x)
    plan = handle.plan
    assert isinstance(plan, Whole)
    rows: dict[str, torch.Tensor | None] = {}
    shape = plan.rows_shape(handle.args)
    dims = len(shape)
    for chunk in handle.chunks:
        routed = one(
            x.detach()[chunk.tokens],
            scales_of(options, x, scales, chunk.tokens),
            in_window(chunk.handle),
        )
        for name in ("x", "scales"):
            taken = _take(getattr(routed, name), chunk.rows, dims)
            output = rows.setdefault(name, _room(name, shape, taken, by_column))
            _put(output, chunk.places, taken, dims)
        like = routed.plan
        del routed
    return Routed(handle, plan.repeated(like, rows), handle.args, handle.block)


class Placed(NamedTuple):
    """Places, in one output, of rows that arrived in several rounds."""

    places: list[torch.Tensor]  # int64 [n] of each round
    shape: tuple[int, ...]  # of the output, without its columns
    rows_per_expert: torch.Tensor  # int64 [groups], with padding
    num_rows: torch.Tensor  # int32 [1]


def placed(
    layout: Layout, groups: list[torch.Tensor], sources: list[torch.Tensor], count: int, ranks: int, alignment: int
) -> Placed:
    """Place rows as one round would.

    Args:
        layout, alignment: of the output.
        groups: int64 `[n]`: the expert here of each row that arrived in a round; flat: zeros.
        sources: int64 `[n]`: its source rank.  In each round, rows are in order of these, and then of tokens.
        count: experts here; flat: 1.
        ranks: of all.
    """
    keys = [group * ranks + source for group, source in zip(groups, sources, strict=True)]
    counts = torch.stack([key.bincount(minlength=count * ranks) for key in keys], dim=-1)  # [groups * R, rounds]
    sizes = counts.view(count, -1).sum(dim=1)
    if layout == "batched":
        rooms = sizes.max().expand(count)
    else:
        align = alignment if layout == "expert" else 1
        rooms = (sizes + align - 1) // align * align
    begins = rooms.cumsum(0) - rooms - (sizes.cumsum(0) - sizes)  # of a group, beyond the rows before it
    base = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts) + begins.repeat_interleave(ranks)[:, None]
    places = []
    for at, key in enumerate(keys):
        starts = counts[:, at].cumsum(0) - counts[:, at]
        places.append(base[key, at] + torch.arange(len(key), device=key.device) - starts[key])
    total = int(rooms.sum())
    used = sizes.sum() if layout == "batched" else rooms.sum()
    shape = (count, total // count) if layout == "batched" else (total,)
    return Placed(places, shape, rooms.clone(), used.to(torch.int32).reshape(1))


def group_of_rows(layout: Layout, counts: torch.Tensor, rows: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a round that hold a token, and the expert here of each (flat: 0), int64 `[n]`.

    Args:
        layout: of the round, without alignment.
        counts: tokens_per_expert.
        rows: num_rows.
        each: batched: rows of an expert.
    """
    counts = counts.long()
    if layout == "batched":
        filled = torch.arange(each, device=counts.device) < counts[:, None]
        held = filled.flatten().nonzero().flatten()
        return held, held // each
    held = torch.arange(rows, device=counts.device)
    if layout == "flat":
        return held, torch.zeros_like(held)
    return held, torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def _copied(routed: Routed, tokens: slice) -> _CopiedChunk:
    plan, made = routed.plan, routed.handle
    shape = plan.rows_shape(routed.args)
    rows, group = group_of_rows(plan.layout, routed.tokens_per_expert, int(routed.num_rows), shape[-1])
    ranks = made.rounds.num_ranks
    sent = window_tensor(made.block, made.args.route.sent, (ranks, 2), torch.int32, plan.device, plan.owner)
    tensors = {name: _take(getattr(routed, name), rows, len(shape)) for name in _BY_ROW}
    src = _take(routed.src, rows, len(shape))
    assert src is not None
    tables, per_expert = tables_of(routed).clone(), routed.tokens_per_expert.clone()
    return _CopiedChunk(tokens, over(tables, made), tensors, per_expert, rows, group, src, sent[:, 0].clone())


def _whole(rounds: Rounds, options: Options, arrived: list[_CopiedChunk], tokens: int) -> Routed:
    plan, layout, ranks = arrived[0].handle.plan, options.layout, rounds.num_ranks
    sources = [chunk.src[:, 0].long() for chunk in arrived]
    groups = 1 if layout == "flat" else plan.local_experts
    where = placed(layout, [c.group for c in arrived], sources, groups, ranks, options.expert_alignment)
    shape, by_column = where.shape, is_by_column(options, plan.x_dtype)
    tensors = {name: _room(name, shape, arrived[0].tensors[name], name == "scales" and by_column) for name in _BY_ROW}
    src = _room("src", shape, arrived[0].src)
    chunks, before = [], torch.zeros(ranks, dtype=torch.int32, device=plan.device)
    for chunk, places, source in zip(arrived, where.places, sources, strict=True):
        for name in _BY_ROW:
            _put(tensors[name], places, chunk.tensors[name], len(shape))
        chunk.src[:, 1] += before[source]
        _put(src, places, chunk.src, len(shape))
        before += chunk.sent
        room = plan.rows_shape(chunk.handle.args)
        chunks.append(Chunk(chunk.tokens, chunk.handle, room, chunk.rows, places))
    per_expert = torch.stack([chunk.per_expert for chunk in arrived]).sum(0, dtype=torch.int32)
    counts = {
        "src": src,
        "tokens_per_expert": per_expert,
        "rows_per_expert": where.rows_per_expert if layout == "expert" else per_expert.long(),
        "num_rows": where.num_rows,
    }
    args = copy.copy(arrived[0].handle.args)
    args.num_tokens, args.max_rows, args.alignment = tokens, math.prod(shape), options.expert_alignment
    whole = Whole(plan, shape, {**tensors, **counts, **_typed(tensors, plan)})
    handle = ChunkedHandle(rounds, whole, args, arrived[0].handle.block, chunks)
    return Routed(handle, whole, args, handle.block)


def _take(tensor: torch.Tensor | None, rows: torch.Tensor, dims: int) -> torch.Tensor | None:
    """Copy rows of an output whose rows have `dims` dimensions."""
    return None if tensor is None else as_bytes(tensor)[_index(rows, tensor, dims)]


def _put(output: torch.Tensor | None, places: torch.Tensor, rows: torch.Tensor | None, dims: int) -> None:
    if output is not None and rows is not None:
        as_bytes(output)[_index(places, output, dims)] = rows


def _index(rows: torch.Tensor, tensor: torch.Tensor, dims: int) -> tuple[torch.Tensor, ...]:
    return (rows,) if dims == 1 else (rows // tensor.shape[1], rows % tensor.shape[1])


def is_by_column(options: Options, x_dtype: torch.dtype) -> bool:
    """Return whether scales arrive by column.  Beside rows of bytes they are laid out when they are read."""
    return options.scale_layout == "column" and x_dtype is not torch.uint8


def _room(name: str, shape: tuple[int, ...], like: torch.Tensor | None, by_column: bool = False) -> torch.Tensor | None:
    """Make an output of rows like these, filled with the values of padding.  `by_column`: see Routed.scales."""
    if like is None:
        return None
    columns = like.shape[1:]
    if not by_column:
        return like.new_full((*shape, *columns), _NO_ROW.get(name, 0))
    *groups, rows = shape
    stored = like.new_zeros((*groups, *columns, -(-rows // 4) * 4))
    return stored.transpose(-1, -2)[..., :rows, :]
