"""Budgets of rows: the entries of a routing that their ranks have room for, by the counts of all ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from moecomm.base.arrays import check_memory
from moecomm.gpu import row_pass

_MOST = torch.iinfo(torch.int32).max
_SEGMENT, _SEGMENTS = 1024, 16  # least entries of a segment, unless there are fewer, and most segments


class Rule(NamedTuple):
    """The rule by which entries are dropped, see kept().

    Attributes:
        rank: this one.
        experts: of all ranks, a multiple of their number.
        alignment: rows of an expert are padded to a multiple.
        budget: rows that this rank has room for; ranks may differ.
    """

    rank: int
    ranks: int
    experts: int
    alignment: int
    budget: int

    @property
    def columns(self) -> int:
        """Words of a row of counts: whole 16 bytes."""
        return -(-(self.experts + 1) // 4) * 4


class Counted(NamedTuple):
    """Attributes:
    rows: what each rank is sent, int32 `[R, columns]`: the number of entries of each expert, then the budget.
    to: the rank to which each row of `rows` goes, int64 `[R, 1]`.
    parts: int32 `[experts, segments]`: the same by segment of the routing, for the kernel behind kept(); else None.
    """

    rows: torch.Tensor
    to: torch.Tensor
    parts: torch.Tensor | None = None


class Kept(NamedTuple):
    """Attributes:
    ids: as given, with -1 in the place of each entry that its rank has no room for.
    overflow: int32 `[1]`; 1: this rank has too little room.
    needed: int64 `[1]`, the rows that it would need room for, padding included.
    """

    ids: torch.Tensor
    overflow: torch.Tensor
    needed: torch.Tensor


def counted(ids: torch.Tensor, rule: Rule) -> Counted:
    """Count the entries of each expert.

    Args:
        ids: int64 or int32 `[T, K]`; those that no expert has are not counted.
    """
    if ids.is_cuda:
        check_memory("topk_idx", ids)  # kept() relies on this check, too
        ids = ids.contiguous()
        rows = torch.zeros(rule.ranks, rule.columns, dtype=torch.int32, device=ids.device)
        to = torch.empty(rule.ranks, 1, dtype=torch.int64, device=ids.device)
        segments = max(1, min(_SEGMENTS, ids.numel() // _SEGMENT))
        parts = torch.empty(rule.experts, segments, dtype=torch.int32, device=ids.device)
        _run("count_entries", rule, ids, parts, table=rows, to=to)
        return Counted(rows, to, parts)
    flat = ids.flatten().long()
    here = flat[(flat >= 0) & (flat < rule.experts)]
    row = torch.zeros(rule.columns, dtype=torch.int32)
    row[: rule.experts] = here.bincount(minlength=rule.experts)
    row[rule.experts] = min(rule.budget, _MOST)
    return Counted(row.expand(rule.ranks, -1).contiguous(), torch.arange(rule.ranks).unsqueeze(1))


def kept(ids: torch.Tensor, table: torch.Tensor, rule: Rule, parts: torch.Tensor | None = None) -> Kept:
    """Return the entries that there is room for.

    The rows of a rank are in the order of its experts, padded to `alignment`, then of source ranks, then of tokens; a
    row at or behind the rank's budget is dropped.

    Args:
        ids: those that were counted.
        table: int32 `[R, columns]`, the counts and the budget of each rank.
        parts: see Counted.
    """
    if parts is not None:
        found = Kept(
            torch.empty_like(ids, memory_format=torch.contiguous_format),
            torch.empty(1, dtype=torch.int32, device=ids.device),
            torch.empty(1, dtype=torch.int64, device=ids.device),
        )
        made = {"kept": found.ids, "overflow": found.overflow, "needed": found.needed}
        _run("keep_entries", rule, ids.contiguous(), parts, table=table, **made)
        return found
    experts, me = rule.experts, rule.rank
    flat = ids.flatten().long()
    column = torch.where((flat >= 0) & (flat < experts), flat, experts)  # the last one: no expert
    sent, budgets = table[:, :experts].long(), table[:, experts].long()
    padded = -(-sent.sum(dim=0).view(rule.ranks, -1) // rule.alignment) * rule.alignment
    ends = padded.cumsum(dim=1)
    first = (ends - padded).flatten() + sent[:me].sum(dim=0)  # the row of our first entry of each expert
    room = budgets.repeat_interleave(experts // rule.ranks) - first
    room = torch.cat([room, room.new_full((1,), flat.numel())])  # entries of ours that each expert takes
    counts = column.bincount(minlength=experts + 1)
    order = column.argsort(stable=True)
    nth_sorted = torch.arange(flat.numel()) - (counts.cumsum(dim=0) - counts)[column[order]]
    nth = torch.empty_like(order).scatter_(0, order, nth_sorted)  # of our entries of the same expert
    return Kept(
        torch.where((nth < room[column]).view_as(ids), ids, -1), (ends[me, -1:] > budgets[me]).int(), ends[me, -1:]
    )


def _run(name: str, rule: Rule, ids: torch.Tensor, parts: torch.Tensor, **others: torch.Tensor) -> None:
    kernel, segments = row_pass.kernel(name, row_pass.IDS[ids.dtype]), parts.shape[1]
    fields = {"ids": ids.data_ptr(), "parts": parts.data_ptr(), **_sizes(rule, ids.numel(), segments)}
    for field, tensor in others.items():
        fields[field] = tensor.data_ptr()
    row_pass.run(kernel, ids.device, (rule.experts + 1) * segments * row_pass.ROW, **fields)


@lru_cache(maxsize=64)
def _sizes(rule: Rule, entries: int, segments: int) -> dict[str, int]:
    """Return the fields that are the same in every call."""
    budget = min(rule.budget, _MOST)
    return {**rule._asdict(), "budget": budget, "pitch": rule.columns, "entries": entries, "segments": segments}
