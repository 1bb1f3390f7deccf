"""Budgets of rows in HybridEPBuffer: entries of a routing that have no room are dropped, on the device, and flagged."""

from __future__ import annotations

import torch

from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.pool import Pool
from moecomm.dispatch import Options, dispatch, outputs

_FLAT = Options("flat")


def drop_excess(
    pool: Pool, ids: torch.Tensor, num_experts: int, rows: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with -1 in the place of each entry that its rank has no room for, and int32 `[1]`: 1 if we have too little.

    See within_budgets().
    """
    return within_budgets(pool, ids, num_experts, rows, alignment)[:2]


def within_budgets(
    pool: Pool, ids: torch.Tensor, num_experts: int, rows: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of drop_excess(), and int64 `[1]`: the rows that we would need room for, padding included.

    The rule is deep_ep's.  The rows of a rank are in the order of its experts, padded to `alignment`, then of source
    ranks, then of tokens; a row at or behind the rank's budget is dropped.  A budget counts in multiples of
    `alignment`.  Every rank knows all counts and budgets from a small round, so nothing waits for the device.

    Args:
        ids: int32 or int64 `[T, K]`; ids that no expert has are left to the dispatch, which names them.
        rows: this rank's budget; ranks may differ.
    """
    ranks, me = pool.ranks.ranks, pool.ranks.rank
    flat = ids.flatten().long()
    column = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)  # the last one: no expert
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, column, torch.ones_like(column))
    table = _exchange(pool, counts[:num_experts], rows // alignment * alignment)
    sent, budgets = table[:, :num_experts], table[:, num_experts]
    total = sent.sum(dim=0).view(ranks, -1)
    padded = (total + alignment - 1) // alignment * alignment
    ends = padded.cumsum(dim=1)
    first = (ends - padded).flatten() + sent[:me].sum(dim=0)  # the row of our first entry of each expert
    room = budgets.repeat_interleave(num_experts // ranks, output_size=num_experts) - first
    room = torch.cat([room, room.new_full((1,), flat.numel())])  # entries of ours that each expert takes
    order = column.argsort(stable=True)
    nth_sorted = torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(dim=0) - counts)[column[order]]
    nth = torch.empty_like(order).scatter_(0, order, nth_sorted)  # of our entries of the same expert
    kept = torch.where((nth < room[column]).view_as(ids), ids, -1)
    return kept, (ends[me, -1:] > budgets[me]).int(), ends[me, -1:]


def _exchange(pool: Pool, counts: torch.Tensor, budget: int) -> torch.Tensor:
    """int64 `[R, E + 1]`: the counts of every rank, and its budget behind them."""
    ranks, columns = pool.ranks.ranks, len(counts) + 1
    row = torch.zeros(-(-columns // 4) * 4, dtype=torch.int32, device=counts.device)  # whole 16 bytes
    row[: columns - 1] = counts
    row[columns - 1 :].fill_(min(budget, torch.iinfo(torch.int32).max))
    rows = row.view(torch.float32).expand(ranks, -1).contiguous()  # rows travel as bits
    ids = torch.arange(ranks, device=counts.device).unsqueeze(1)
    buffer: Buffer = pool.flat(rows, ids, ranks, ranks)
    routed = dispatch(buffer.rounds, _FLAT, rows, ids, max_rows=ranks, sync=False)
    return outputs.x(routed).view(torch.int32)[:, :columns].long()
