"""Dispatches that drop what has no room before rows move, without a word to other ranks.

A rank keeps as many rows for each other rank (batched: for each expert) as that has room for, divided by the number of
ranks: those with the largest weights.  So the rows of all ranks fit, as in layers with a capacity factor
(Fedus et al., Switch Transformer, arXiv:2101.03961).
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm.base.arrays import as_tensor
from moecomm.base.choices import Layout
from moecomm.base.experts import owners_of
from moecomm.base.placement import slots_of
from moecomm.base.protocol import DROPPED
from moecomm.dispatch.arguments import check_routing
from moecomm.errors import Unsupported
from moecomm.ranks.settings import Settings
from moecomm.rounds.rounds import Rounds


def drop_checked(
    rounds: Rounds, layout: Layout, alignment: int, max_rows: int | None, topk_idx: Any, topk_weights: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a caller's routing and return what drop() does.  Raises BadInput."""
    given = None if topk_idx is None else as_tensor("topk_idx", topk_idx)[0]
    tokens = 0 if given is None or given.ndim == 0 else len(given)
    ids, weights = check_routing(rounds, tokens, given, topk_weights)
    slots, placement = ids, None if rounds.slots is None else rounds.slots.placement
    if placement is not None:
        if placement.choice == "balanced":  # what is dropped depends on the choice, and the choice on what is left
            raise Unsupported('overflow="drop" with choice="balanced": open the Buffer with another choice')
        slots = slots_of(placement, ids, rounds.rank, rounds.domain_ranks, rounds.masked)
    kept, dropped = drop(rounds.settings, layout, alignment, max_rows, slots, weights)
    if placement is not None:
        kept = torch.where(kept < 0, -1, ids)
    rounds.session.order()
    rounds.session.counters()[DROPPED].add_(dropped[0])
    return kept, dropped


def drop(
    settings: Settings,
    layout: Layout,
    alignment: int,
    max_rows: int | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert ids `[T, K]`, -1 where an entry is dropped, and the number of dropped entries, int32 `[1]`.

    Runs on the device and does not wait for it.  Of equal weights, and without weights, the first tokens stay.
    """
    quota = min(_quota(settings, layout, alignment, max_rows, rank) for rank in settings.extremes)
    weights = torch.zeros(topk_idx.shape, device=topk_idx.device) if topk_weights is None else topk_weights
    ids = topk_idx.long()
    known = (ids >= 0) & (ids < settings.num_experts)  # the dispatch reports others
    owners = owners_of(ids, settings.num_experts, settings.ranks)
    if layout == "flat":
        kept = _of_tokens(torch.where(known, owners, settings.ranks), weights, settings.ranks, quota)
    else:
        owners = ids if layout == "batched" else owners
        count = settings.num_experts if layout == "batched" else settings.ranks
        kept = _of_entries(torch.where(known, owners, count).flatten(), weights.flatten(), count, quota)
    kept = kept.view_as(known) | ~known
    return torch.where(kept, topk_idx, -1), (~kept).sum(dtype=torch.int32).reshape(1)


def _quota(settings: Settings, layout: Layout, alignment: int, max_rows: int | None, rank: int) -> int:
    """Return the rows that each rank may send to a rank (batched: to each of its experts)."""
    local = settings.local_experts(rank)
    groups = local if layout == "batched" else 1
    rows = settings.capacity_rows(layout, alignment, rank=rank)
    if max_rows is not None:
        rows = min(max_rows * groups, settings.worst_rows(layout, alignment, rank=rank))
    if layout == "expert":
        rows -= (alignment - 1) * local
    return max(0, rows) // groups // settings.ranks


def _of_entries(group: torch.Tensor, weights: torch.Tensor, groups: int, quota: int) -> torch.Tensor:
    """Return whether each entry is among the `quota` entries of its group with the largest weights."""
    order = weights.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    sorted_group = group[order]
    sizes = torch.zeros(groups + 1, dtype=torch.int64, device=group.device)
    sizes.scatter_add_(0, sorted_group, torch.ones_like(sorted_group))
    place = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[sorted_group]
    return torch.empty_like(group, dtype=torch.bool).scatter_(0, order, place < quota)


def _of_tokens(owner: torch.Tensor, weights: torch.Tensor, ranks: int, quota: int) -> torch.Tensor:
    """Return whether each entry `[T, K]` belongs to the `quota` first tokens of its owner, by the sum of weights."""
    tokens = len(owner)
    sums = torch.zeros(tokens, ranks + 1, device=owner.device).scatter_add_(1, owner, weights)
    wanted = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=owner.device).scatter_(1, owner, True)
    order = torch.where(wanted, sums, -torch.inf).argsort(dim=0, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(tokens, device=owner.device)[:, None].expand_as(order)
    )
    return (place < quota).gather(1, owner)
