"""deep_ep's layouts and prefix matrix, in plain torch: who sends how many tokens where.

moecomm exchanges and computes all of this inside its rounds.  These are for callers that look at them.
"""

from __future__ import annotations

import torch

from moecomm.compat.deep_ep.lazy import LazyTuple, by_token
from moecomm.dispatch.routed import Handle
from moecomm.dispatch.tables import kept


def counts(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank `[R]`, num_tokens_per_expert `[E]`, is_token_in_rank `[T, R]`; never waits for the device.

    An id outside 0 to E - 1 is counted as none here; the dispatch says that it is one.
    """
    device = topk_idx.device
    expert = topk_idx.long()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)  # column E: none
    to_rank = torch.zeros((len(expert), ranks + 1), dtype=torch.bool, device=device)
    to_rank.scatter_(1, expert // (num_experts // ranks), True)
    is_token_in_rank = to_rank[:, :ranks].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, expert.flatten(), torch.ones(expert.numel(), dtype=torch.int32, device=device))
    return is_token_in_rank.sum(dim=0, dtype=torch.int32), per_expert[:num_experts], is_token_in_rank


class NormalHandle(LazyTuple):
    """deep_ep's handle of a normal dispatch: six items, of which `rank_prefix_matrix` i32[R, R], `recv_src_idx`
    i32[rows] (the fourth) and `is_token_in_rank` bool[T, R] are here; those for deep_ep's channels are None.

    Items are computed, by a few small kernels each, when they are first read.  Of `rank_prefix_matrix` the column of
    this rank is filled, where its rows from each rank end; the others, which are the other ranks' own, are -1.
    """

    makers = (
        lambda self: rank_prefix_matrix(self.native),
        lambda self: None,
        lambda self: None,
        lambda self: kept(self.native, "src")[:, 1].contiguous(),
        lambda self: is_token_in_rank(self.native),
        lambda self: None,
    )

    native: Handle


def rank_prefix_matrix(handle: Handle) -> torch.Tensor:
    """`[:, rank]`: where the rows from each rank end here; -1 elsewhere."""
    ranks = handle.rounds.num_ranks
    matrix = torch.full((ranks, ranks), -1, dtype=torch.int32, device=handle.plan.device)
    matrix[:, handle.rounds.rank] = rows_up_to_rank(handle)
    return matrix


def rows_up_to_rank(handle: Handle) -> torch.Tensor:
    """Return int32 `[R]`: number of flat rows from ranks 0 to r."""
    device = handle.plan.device
    ids = torch.arange(handle.rounds.num_ranks, dtype=torch.int32, device=device)
    in_use = torch.arange(handle.args.max_rows, dtype=torch.int32, device=device) < kept(handle, "num_rows")
    return ((kept(handle, "src")[:, :1] <= ids) & in_use.unsqueeze(1)).sum(dim=0, dtype=torch.int32)


def is_token_in_rank(handle: Handle) -> torch.Tensor:
    """bool `[T, R]`: whether a token of ours has an expert there."""
    if handle.num_tokens == 0:
        return torch.zeros((0, handle.rounds.num_ranks), dtype=torch.bool, device=handle.plan.device)
    return by_token(handle, "token_slot", handle.rounds.num_ranks) >= 0
