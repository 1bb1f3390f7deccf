"""deep_ep's handles: where the tokens of a dispatch went.

Their items are computed, in plain torch, when they are first read: few callers look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from moecomm.base.bound import Bound
from moecomm.dispatch.routed import ChunkedHandle, Handle
from moecomm.dispatch.tables import kept, table
from moecomm.errors import BadInput


class LazyTuple(Bound, tuple[Any, ...]):
    """len(), indexing, slicing, iteration and unpacking, as of a tuple; an item is made once.  Equal to itself only.

    `makers`, of a subclass, make the items of an instance.
    """

    _instead = Handle._instead
    makers: tuple[Callable[[Any], Any], ...] = ()
    _items: dict[int, Any] | None = None  # until one is read

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if self._items is None:
            self._items = {}
        if index not in self._items:
            self._items[index] = self.makers[index](self)
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __contains__(self, item: object) -> bool:
        return any(item is mine for mine in self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"


def by_token(handle: Handle, name: str, columns: int) -> torch.Tensor:
    """int32 `[T, columns]`: a table of the route with a row for each token of this rank."""
    if isinstance(handle, ChunkedHandle):
        return torch.cat([by_token(chunk.handle, name, columns) for chunk in handle.chunks])
    shape = (handle.num_tokens, columns)
    if handle.num_tokens == 0:
        return torch.zeros(shape, dtype=torch.int32, device=handle.plan.device)
    return table(handle, getattr(handle.args.route, name), shape, torch.int32)


def counts_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


class EPHandle:
    """The handle that ElasticBuffer's and EPBuffer's dispatch return, and combine and a cached dispatch take.

    `topk_idx` is a copy, or the caller's tensor with `do_handle_copy=False` and in EPBuffer.
    `token_metadata_at_forward` and `channel_linked_list` are of deep_ep's hybrid mode, and None, as they are there
    within one NVLink domain.
    """

    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None

    def __init__(
        self,
        native: Handle,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        synced: bool,
    ) -> None:
        self.native, self.synced = native, synced
        self.do_expand = native.layout == "expert"
        self.num_experts, self.expert_alignment = num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms = num_max_tokens_per_rank, num_sms
        self._topk_idx = topk_idx
        self._version = None if topk_idx.is_inference() else topk_idx._version

    @property
    def topk_idx(self) -> torch.Tensor:
        """`[T, K]`: the experts that were dispatched to.

        Raises:
            BadInput: the caller has changed this tensor since.
        """
        if self._version is not None and self._topk_idx._version != self._version:
            raise BadInput(
                "topk_idx", "a tensor that has changed since its dispatch", "one that stays while the handle is in use"
            )
        return self._topk_idx

    @cached_property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Rows of each local expert, aligned; empty without a CPU sync."""
        if not self.synced:
            return []
        align = self.expert_alignment
        return [-(-count // align) * align for count in kept(self.native, "tokens_per_expert").tolist()]

    @cached_property
    def num_recv_tokens(self) -> int:
        """Tokens that came, each counted once; without a CPU sync as many as there could be."""
        if not self.synced:
            return self.native.rounds.num_ranks * self.num_max_tokens_per_rank
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1])

    @cached_property
    def num_expanded_tokens(self) -> int:
        """Aligned rows of all local experts; without a CPU sync as many as there could be."""
        if self.synced:
            return sum(self.num_recv_tokens_per_expert_list)
        return most_expanded_rows(self.native, self.num_max_tokens_per_rank, self.expert_alignment)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """int32 `[R]`: tokens from ranks 0 to r, each counted once."""
        if not self.do_expand:
            return rows_up_to_rank(self.native)
        came = self._came()
        return came.sum(dim=1).cumsum(dim=0, dtype=torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 `[E/R]`: rows of each local expert, without padding."""
        return kept(self.native, "tokens_per_expert")

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 `[E/R]`: aligned rows of experts 0 to e; with do_expand, of the last one only those without padding."""
        counts, align = kept(self.native, "tokens_per_expert"), self.expert_alignment
        aligned = (counts + align - 1) // align * align
        ends = aligned.cumsum(dim=0, dtype=torch.int32)
        return ends - aligned + counts if self.do_expand else ends

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32 `[num_recv_tokens, K + 2]`: source rank * num_max_tokens_per_rank + token; source rank * K + the first
        k whose expert is here; and, with do_expand, the row of each k or -1 (else -1).

        One row a token that came, by source rank and token.
        """
        topk, rows = self.native.plan.topk, self.num_recv_tokens
        if not self.do_expand:
            src, idx = kept(self.native, "src"), self.recv_topk_idx
            slots = torch.full_like(idx, -1, dtype=torch.int32)
            is_local = idx >= 0
        else:
            slots = expert_rows(self.native, rows)
            most = max(1, self.native.args.max_rows)
            src = (
                kept(self.native, "src")[slots.amax(dim=1).clamp(0, most - 1).long()] if rows else slots.new_zeros(0, 2)
            )
            is_local = slots >= 0
        first = is_local.int().argmax(dim=1).int()
        token = src[:, 0] * self.num_max_tokens_per_rank + src[:, 1]
        return torch.cat([token.unsqueeze(1), (src[:, 0] * topk + first).unsqueeze(1), slots], dim=1)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 `[T, K]`: how many of our tokens go to the rank of the k-th expert before this one; -1 beside -1."""
        owner = by_token(self.native, "token_owner", self.native.plan.topk)
        if self.native.num_tokens == 0:
            return owner
        sent = is_token_in_rank(self.native).int()
        before = sent.cumsum(dim=0, dtype=torch.int32) - sent
        return torch.where(owner >= 0, before.gather(1, owner.clamp(min=0).long()), -1)

    @cached_property
    def recv_topk_idx(self) -> torch.Tensor:
        """`[rows, K]`, without do_expand: local experts, -1 elsewhere."""
        return kept(self.native, "topk_idx")

    def _came(self) -> torch.Tensor:
        """Return bool `[R, num_max_tokens_per_rank]`, with do_expand: whether a token has a row here."""
        src, ranks, tokens = kept(self.native, "src"), self.native.rounds.num_ranks, self.num_max_tokens_per_rank
        row = torch.arange(len(src), dtype=torch.int32, device=src.device)
        valid = (row < kept(self.native, "num_rows")) & (src[:, 0] >= 0)
        place = torch.where(valid, src[:, 0] * tokens + src[:, 1], ranks * tokens)  # the last place: no token
        came = torch.zeros(ranks * tokens + 1, dtype=torch.bool, device=src.device)
        return came.index_fill_(0, place.long(), True)[:-1].view(ranks, tokens)


def expert_rows(native: Handle, tokens: int) -> torch.Tensor:
    """int32 `[tokens, K]`, with do_expand: the row of each k of a token that came, or -1; by source rank and token."""
    topk = native.plan.topk
    if not isinstance(native, ChunkedHandle):
        return table(native, native.args.route.rows, (tokens, topk), torch.int32)
    src, rows_of_chunks, keys = kept(native, "src").long(), [], []
    key = src[:, 0] * native.rounds.num_ranks * native.rounds.max_tokens + src[:, 1]
    for chunk in native.chunks:
        local_keys = key[chunk.places].unique()  # type: ignore[no-untyped-call]
        slots = table(chunk.handle, chunk.handle.args.route.rows, (len(local_keys), topk), torch.int32).long()
        whole = torch.full((chunk.handle.args.max_rows + 1,), -1, device=src.device)  # the last place: no row
        whole[chunk.rows] = chunk.places
        rows_of_chunks.append(whole[slots])
        keys.append(local_keys)
    return torch.cat(rows_of_chunks)[torch.cat(keys).argsort()].int()


def most_expanded_rows(native: Handle, tokens: int, alignment: int) -> int:
    """Return the rows that do_expand makes room for without a CPU sync: see expanded_rows."""
    return expanded_rows(native.rounds.num_ranks, tokens, native.plan.topk, native.plan.local_experts, alignment)


def expanded_rows(ranks: int, tokens: int, topk: int, local_experts: int, alignment: int) -> int:
    """Upper bound of the rows that a rank receives, each token once per local expert, with padding to `alignment`."""
    rows = ranks * tokens * min(topk, local_experts) + (alignment - 1) * local_experts
    return -(-rows // alignment) * alignment


class HybridEPHandle(LazyTuple):
    """The routing of a dispatch_with_permute, for combine_with_unpermute and to repeat it.

    It has deep_ep's eleven items.  The last is `overflow_flag`, int32 `[1]` on the device: 1 if tokens were dropped
    here because num_permuted_tokens has no room for them.  Before it come tokens_per_expert int32 `[E/R]`,
    num_of_tokens_per_rank and the config; the seven maps of deep_ep's kernels are None.
    """

    makers = (
        *(7 * (lambda self: None,)),
        lambda self: kept(self.native, "tokens_per_expert"),
        lambda self: self.native.num_tokens,
        lambda self: self.config,
        lambda self: self.overflow_flag,
    )

    native: Handle
    ids: torch.Tensor
    num_experts: int
    tokens_per_expert: torch.Tensor
    rows: int
    overflow_flag: torch.Tensor
    config: SimpleNamespace


class HybridEPDispatchHandle(LazyTuple):
    """The routing of a dispatch without a permutation, for combine and to repeat it.

    It has deep_ep's seven items: three maps of its kernels, which are None, the rows that came int32 `[1]`,
    local_expert_routing_map bool `[rows, E/R]`, num_of_tokens_per_rank and the config.
    """

    makers = (
        *(3 * (lambda self: None,)),
        lambda self: kept(self.native, "num_rows"),
        lambda self: self.local_expert_routing_map(),
        lambda self: self.native.num_tokens,
        lambda self: self.config,
    )

    native: Handle
    ids: torch.Tensor
    num_experts: int
    config: SimpleNamespace

    @property
    def experts(self) -> torch.Tensor:
        """`[rows, K]`: the experts of each row that are here, -1 elsewhere."""
        local = kept(self.native, "topk_idx")
        return torch.where(local >= 0, local + self.native.rounds.local_experts.start, -1)

    def local_expert_routing_map(self) -> torch.Tensor:
        """Return which experts here a row is for."""
        local, experts = kept(self.native, "topk_idx"), self.native.plan.local_experts
        routing_map = torch.zeros((len(local), experts + 1), dtype=torch.bool, device=local.device)
        return routing_map.scatter_(1, torch.where(local >= 0, local, experts).long(), True)[:, :experts]
