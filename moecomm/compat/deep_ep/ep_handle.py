"""deep_ep 2's EPHandle: where the tokens of a dispatch went.  Its tensors are computed when they are first read."""

from __future__ import annotations

from functools import cached_property

import torch

from moecomm.compat.deep_ep import layout
from moecomm.compat.deep_ep.lazy import by_token
from moecomm.dispatch.routed import ChunkedHandle, Handle
from moecomm.dispatch.tables import kept, table
from moecomm.errors import BadInput


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
            return layout.rows_up_to_rank(self.native)
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
            here = idx >= 0
        else:
            slots = expert_rows(self.native, rows)
            most = max(1, self.native.args.max_rows)
            src = (
                kept(self.native, "src")[slots.amax(dim=1).clamp(0, most - 1).long()] if rows else slots.new_zeros(0, 2)
            )
            here = slots >= 0
        first = here.int().argmax(dim=1).int()
        token = src[:, 0] * self.num_max_tokens_per_rank + src[:, 1]
        return torch.cat([token.unsqueeze(1), (src[:, 0] * topk + first).unsqueeze(1), slots], dim=1)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 `[T, K]`: how many of our tokens go to the rank of the k-th expert before this one; -1 beside -1."""
        owner = by_token(self.native, "token_owner", self.native.plan.topk)
        if self.native.num_tokens == 0:
            return owner
        sent = layout.is_token_in_rank(self.native).int()
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
        at = torch.where(valid, src[:, 0] * tokens + src[:, 1], ranks * tokens)  # the last place: no token
        came = torch.zeros(ranks * tokens + 1, dtype=torch.bool, device=src.device)
        return came.index_fill_(0, at.long(), True)[:-1].view(ranks, tokens)


def expert_rows(native: Handle, tokens: int) -> torch.Tensor:
    """int32 `[tokens, K]`, with do_expand: the row of each k of a token that came, or -1; by source rank and token."""
    topk = native.plan.topk
    if not isinstance(native, ChunkedHandle):
        return table(native, native.args.route.rows, (tokens, topk), torch.int32)
    src, found, keys = kept(native, "src").long(), [], []
    key = src[:, 0] * native.rounds.num_ranks * native.rounds.max_tokens + src[:, 1]
    for chunk in native.chunks:
        here = key[chunk.places].unique()  # type: ignore[no-untyped-call]
        slots = table(chunk.handle, chunk.handle.args.route.rows, (len(here), topk), torch.int32).long()
        whole = torch.full((chunk.handle.args.max_rows + 1,), -1, device=src.device)  # the last place: no row
        whole[chunk.rows] = chunk.places
        found.append(whole[slots])
        keys.append(here)
    return torch.cat(found)[torch.cat(keys).argsort()].int()


def most_expanded_rows(native: Handle, tokens: int, alignment: int) -> int:
    """Return the rows that do_expand makes room for without a CPU sync: see expanded_rows."""
    return expanded_rows(native.rounds.num_ranks, tokens, native.plan.topk, native.plan.local_experts, alignment)


def expanded_rows(ranks: int, tokens: int, topk: int, local_experts: int, alignment: int) -> int:
    """Upper bound of the rows that a rank receives, each token once per local expert, with padding to `alignment`."""
    rows = ranks * tokens * min(topk, local_experts) + (alignment - 1) * local_experts
    return -(-rows // alignment) * alignment
