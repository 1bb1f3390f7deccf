"""deep_ep's layouts and prefix matrices, in plain torch: who sends how many tokens where, and in which channel.

moecomm exchanges and computes all of this inside its rounds.  These are for callers that look at them.
"""

from __future__ import annotations

import torch

from moecomm.compat.deep_ep.lazy import LazyTuple, by_token, tokens_of_ranks
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
    """deep_ep's handle of a normal dispatch: `rank_prefix_matrix` i32[R, R], `channel_prefix_matrix` i32[R, C],
    `recv_channel_prefix_matrix` i32[R, C], `recv_src_idx` i32[rows], `is_token_in_rank` bool[T, R] and `send_head`
    i32[T, R], C = num_sms // 2.

    All are computed, by a few small kernels each, when they are first read.  Of `rank_prefix_matrix` the column of
    this rank is filled, where its rows from each rank end; the others, which are the other ranks' own, are -1.
    """

    makers = (
        lambda self: rank_prefix_matrix(self.native),
        lambda self: channel_prefix_matrix(self.native, self.channels),
        lambda self: recv_channel_prefix_matrix(self.native, self.channels),
        lambda self: kept(self.native, "src")[:, 1].contiguous(),
        lambda self: is_token_in_rank(self.native),
        lambda self: send_head(self.native, self.channels),
    )

    native: Handle
    num_sms: int

    @property
    def channels(self) -> int:
        """Channels of two SMs each."""
        return max(1, self.num_sms // 2)


def normal_handle(native: Handle, num_sms: int) -> NormalHandle:
    """Return the handle of a dispatch that deep_ep would have run on so many SMs."""
    handle = NormalHandle(NormalHandle.makers)  # quicker than through a __new__ of its own
    handle.native, handle.num_sms = native, num_sms
    return handle


def rank_prefix_matrix(handle: Handle) -> torch.Tensor:
    """`[:, rank]`: where the rows from each rank end here; -1 elsewhere."""
    ranks = handle.rounds.num_ranks
    matrix = torch.full((ranks, ranks), -1, dtype=torch.int32, device=handle.plan.device)
    matrix[:, handle.rounds.rank] = rows_up_to_rank(handle)
    return matrix


def rows_up_to_rank(handle: Handle) -> torch.Tensor:
    """Return int32 `[R]`: number of flat rows from ranks 0 to r."""
    ids = torch.arange(handle.rounds.num_ranks, dtype=torch.int32, device=handle.plan.device)
    return ((kept(handle, "src")[:, :1] <= ids) & _valid(handle)).sum(dim=0, dtype=torch.int32)


def channel_prefix_matrix(handle: Handle, channels: int) -> torch.Tensor:
    """`[r, c]`: our tokens for rank r in channels 0 to c, which have `ceil(T / C)` tokens each."""
    sent = is_token_in_rank(handle).cumsum(dim=0, dtype=torch.int32)
    ends = _channel_ends(len(sent), channels, handle.plan.device)
    before = torch.cat([sent.new_zeros(1, sent.shape[1]), sent])
    return before[ends].T.contiguous()


def recv_channel_prefix_matrix(handle: Handle, channels: int) -> torch.Tensor:
    """`[s, c]`: tokens from rank s in the channels before c."""
    src = kept(handle, "src")
    device = handle.plan.device
    size = ((tokens_of_ranks(handle) + channels - 1) // channels).clamp(min=1)  # [R], tokens of a channel
    rank = torch.where(_valid(handle)[:, 0], src[:, 0], 0).long()
    channel = (src[:, 1] // size[rank]).clamp(0, channels - 1).long()
    per_channel = torch.zeros((handle.rounds.num_ranks, channels), dtype=torch.int32, device=device)
    per_channel.index_put_((rank, channel), _valid(handle)[:, 0].int(), accumulate=True)
    return per_channel.cumsum(dim=1, dtype=torch.int32) - per_channel


def is_token_in_rank(handle: Handle) -> torch.Tensor:
    """bool `[T, R]`: whether a token of ours has an expert there."""
    if handle.num_tokens == 0:
        return torch.zeros((0, handle.rounds.num_ranks), dtype=torch.bool, device=handle.plan.device)
    return by_token(handle, "token_slot", handle.rounds.num_ranks) >= 0


def send_head(handle: Handle, channels: int) -> torch.Tensor:
    """int32 `[T, R]`: how many tokens its channel has for that rank before this one; -1 where it does not go."""
    sent = is_token_in_rank(handle)
    so_far = sent.cumsum(dim=0, dtype=torch.int32)
    before = torch.cat([so_far.new_zeros(1, so_far.shape[1]), so_far])
    size = max(1, -(-len(sent) // channels))
    start = torch.arange(len(sent), device=sent.device) // size * size
    return torch.where(sent, before[:-1] - before[start], -1)


def _channel_ends(tokens: int, channels: int, device: torch.device) -> torch.Tensor:
    size = -(-tokens // channels)
    return (torch.arange(1, channels + 1, device=device) * size).clamp(max=tokens)


def _valid(handle: Handle) -> torch.Tensor:
    """bool `[rows, 1]`: rows in use."""
    rows = torch.arange(handle.args.max_rows, dtype=torch.int32, device=handle.plan.device)
    return (rows < kept(handle, "num_rows")).unsqueeze(1)
