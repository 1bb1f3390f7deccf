"""Differentiable rounds whose rows have no room: one for each part of the tokens.  See moecomm/dispatch/chunks.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moecomm.base.arrays import shown_tensors
from moecomm.base.choices import Layout
from moecomm.dispatch.chunks import group_of_rows, in_parts, placed
from moecomm.dispatch.outputs import as_bytes
from moecomm.dispatch.routed import Chunk
from moecomm.ops import handles
from moecomm.ops.handles import Handle
from moecomm.rounds import names


class Outputs(NamedTuple):
    """The outputs of one round, or of several: fields of moecomm.ops.Dispatched."""

    x: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor
    src: torch.Tensor
    weights: torch.Tensor
    topk_idx: torch.Tensor | None
    handle: Any  # a Handle, or a ChunkedHandle of several rounds
    scales: torch.Tensor | None = None


class ChunkedHandle(NamedTuple):
    """The route of a dispatch that took several rounds: takes the place of a Handle."""

    chunks: tuple[Chunk, ...]
    buffer: str
    layout: Layout
    num_tokens: int
    room: tuple[int, ...]  # shape of the rows, without H

    def __repr__(self) -> str:
        return shown_tensors("moecomm.ops.ChunkedHandle", self._replace(chunks=())._asdict())

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedHandle:
        return handles.deep_copied(self, memo)


def dispatch(
    buffer: str,
    layout: Layout,
    alignment: int,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    one: Callable[..., Outputs],
) -> Outputs:
    """Dispatch tokens in as many rounds as it takes.

    Args:
        buffer, layout, alignment: of the dispatch.
        given: x, topk_idx and topk_weights.
        one: dispatches such tensors of some tokens, without alignment, given the first of them.  Like that of
            in_parts(), it waits.
    """
    owner, tokens = names.find(buffer), len(given[0])
    ranks = owner.num_ranks

    def some(span: slice) -> Outputs:
        return one(*(None if tensor is None else tensor[span] for tensor in given), first_token=span.start)

    done = list(in_parts(tokens, owner.max_tokens, some))
    rows, groups, sources, src = [], [], [], []
    before = torch.zeros(ranks, dtype=torch.int32, device=owner.device)
    for _, part in done:
        room = part.src.shape[:-1]
        held, group = group_of_rows(layout, part.tokens_per_expert, int(part.num_rows), room[-1])
        found = part.src.view(-1, 2)[held]
        groups.append(group)
        rows.append(held)
        sources.append(found[:, 0].long())
        src.append(torch.stack([found[:, 0], found[:, 1] + before[sources[-1]]], dim=1))
        before = before + handles.tokens_sent(part.handle, ranks)
    count = 1 if layout == "flat" else len(owner.local_experts)
    where = placed(layout, groups, sources, count, ranks, alignment)
    everywhere = torch.cat(where.places)

    def whole(parts: list[torch.Tensor], fill: int) -> torch.Tensor:
        values = torch.cat(parts)
        room = values.new_full((math.prod(where.shape), *values.shape[1:]), fill)
        return room.index_copy(0, everywhere, values).view(*where.shape, *values.shape[1:])

    def of_rows(tensors: list[torch.Tensor], fill: int = 0) -> torch.Tensor:
        dims = len(where.shape)
        found = [as_bytes(t).flatten(0, dims - 1)[held] for t, held in zip(tensors, rows, strict=True)]
        room, dtype = whole(found, fill), tensors[0].dtype
        return room if room.dtype is dtype else room.view(dtype)  # a view of a dtype has no gradient

    parts = [part for _, part in done]
    ids = [part.topk_idx for part in parts if part.topk_idx is not None]
    scales = [part.scales for part in parts if part.scales is not None]
    chunks = tuple(
        Chunk(span, part.handle, tuple(part.src.shape[:-1]), held, places)
        for (span, part), held, places in zip(done, rows, where.places, strict=True)
    )
    return Outputs(
        of_rows([part.x for part in parts]),
        torch.stack([part.tokens_per_expert for part in parts]).sum(0, dtype=torch.int32),
        where.num_rows,
        whole(src, -1),
        of_rows([part.weights for part in parts]),
        of_rows(ids, -1) if ids else None,
        ChunkedHandle(chunks, buffer, layout, tokens, where.shape),
        of_rows(scales) if scales else None,
    )


def dispatch_again(
    x: torch.Tensor, handle: ChunkedHandle, one: Callable[[torch.Tensor, Handle], torch.Tensor]
) -> torch.Tensor:
    """Send other rows along the route of an earlier dispatch.  `one` does so for some tokens."""
    dims = len(handle.room)
    found = [one(x[chunk.tokens], chunk.handle).flatten(0, dims - 1)[chunk.rows] for chunk in handle.chunks]
    values = torch.cat(found)
    room = values.new_zeros((math.prod(handle.room), *values.shape[1:]))
    places = torch.cat([chunk.places for chunk in handle.chunks])
    return room.index_copy(0, places, values).view(*handle.room, *values.shape[1:])


def combine(
    y: torch.Tensor, handle: ChunkedHandle, one: Callable[[torch.Tensor, Handle], torch.Tensor]
) -> torch.Tensor:
    """Combine rows in the rounds of their dispatch.  `one` does so for some tokens."""
    return torch.cat([one(chunk.of(y), chunk.handle) for chunk in handle.chunks])
