"""Budgets of rows in HybridEPBuffer: entries of a routing that have no room are dropped, on the device, and flagged."""

from __future__ import annotations

import torch

from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.pool import Pool
from moecomm.dispatch import Options, Request, dispatch
from moecomm.gpu import budgets

_FLAT = Request(Options("flat"))


def within_budgets(pool: Pool, ids: torch.Tensor, num_experts: int, rows: int, alignment: int) -> budgets.Kept:
    """Return the entries that their ranks have room for.

    The rule is deep_ep's: see moecomm.gpu.budgets.kept().  A budget counts in multiples of `alignment`.  Every rank
    knows all counts and budgets from a small round, so nothing waits for the device.

    Args:
        ids: int32 or int64 `[T, K]`; ids that no expert has are left to the dispatch, which names them.
        rows: this rank's budget; ranks may differ.
    """
    rule = budgets.Rule(pool.ranks.rank, pool.ranks.ranks, num_experts, alignment, rows // alignment * alignment)
    counted = budgets.counted(ids, rule)
    words = counted.rows.view(torch.float32)  # rows travel as bits
    buffer: Buffer = pool.flat(words, counted.to, rule.ranks, rule.ranks)
    pool.calls.begin(buffer.rounds)
    routed = dispatch(buffer.rounds, _FLAT, words, counted.to, max_rows=rule.ranks, sync=False)
    return budgets.kept(ids, routed.x.view(torch.int32), rule, counted.parts)
