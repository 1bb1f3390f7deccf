"""Checks that deep_ep's own tests make: of normal calls as its test of one node does, and of its second interface."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moecomm.compat.deep_ep import Buffer, Config, ElasticBuffer

from ..backends.conftest import all_ranks
from . import oracle

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 24, 256, 4, 16
LOCAL = EXPERTS // RANKS


def routing(rank: int, masked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    scores = torch.randn(TOKENS, EXPERTS, generator=g).abs() + 1
    weights, ids = scores.topk(TOPK, dim=1, sorted=False)
    if masked:
        ids[torch.rand(ids.shape, generator=g) < 0.3] = -1
        weights[ids < 0] = 0
    return ids, weights


def has_token(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([((ids >= 0) & (ids // LOCAL == rank)).any(dim=1) for rank in range(RANKS)], dim=1)


def cast_back(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (q.float().unflatten(1, (-1, 128)) * scales.unsqueeze(2)).flatten(1).bfloat16()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_normal_calls(fp8: bool, masked: bool) -> None:
    """Rows say where they come from.  Weights beside -1 are filled in, as its test does, and all of them are added."""

    def body(group: Any) -> None:
        buffer, rank, config = Buffer(group), group.rank, Config(24, 8, 256)
        x = torch.full((TOKENS, HIDDEN), float(rank)).bfloat16()
        sent = oracle.cast_to_fp8(x, round_scale=False) if fp8 else x
        if isinstance(sent, tuple):
            sent = (sent[0], sent[1].T.contiguous().T)
        ids, _ = routing(rank, masked)
        weights = torch.full((TOKENS, TOPK), rank + 1.0)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        assert torch.equal(in_rank, has_token(ids)) and torch.equal(per_rank.long(), in_rank.sum(dim=0))
        given: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "config": config,
        }
        plain, none, _, plain_counts, plain_handle, _ = buffer.dispatch(sent, **given)
        recv, recv_ids, recv_weights, counts, handle, _ = buffer.dispatch(
            sent, topk_idx=ids, topk_weights=weights, **given
        )
        rows = cast_back(*recv) if fp8 else recv
        assert none is None and plain_counts == counts
        assert torch.equal(cast_back(*plain) if fp8 else plain, rows)
        ends = handle[0][:, rank].tolist()
        assert ends == list(
            itertools.accumulate(int(has_token(routing(r, masked)[0])[:, rank].sum()) for r in range(RANKS))
        )
        assert counts == [int((recv_ids == e).sum()) for e in range(LOCAL)]
        for source, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            assert (rows[start:end] == source).all()
            filled = recv_weights[start:end].amax(dim=1, keepdim=True).expand(-1, TOPK)
            assert (filled == source + 1).all() and (recv_weights[start:end][recv_ids[start:end] < 0] == 0).all()
        worst, worst_ids, worst_weights, no_counts, _, _ = buffer.dispatch(
            sent, topk_idx=ids, topk_weights=weights, num_worst_tokens=TOKENS * RANKS, **given
        )
        assert no_counts == [] and torch.equal((cast_back(*worst) if fp8 else worst)[: len(rows)], rows)
        assert torch.equal(worst_ids[: len(rows)], recv_ids) and (worst_ids[len(rows) :] == -1).all()
        assert torch.equal(worst_weights[: len(rows)], recv_weights)
        cached, *_ = buffer.dispatch(sent, handle=plain_handle, config=config)
        assert torch.equal(cast_back(*cached) if fp8 else cached, rows)

        fill = torch.where(recv_ids < 0, recv_weights.amax(dim=1, keepdim=True), recv_weights)
        combined, returned, _ = buffer.combine(rows, handle, topk_weights=fill, config=config)
        times = in_rank.sum(dim=1, keepdim=True)
        assert torch.equal(combined, (x.float() * times).bfloat16())
        assert torch.equal(returned, weights * times)

    all_ranks(RANKS, body)


@pytest.mark.parametrize("allow_multiple_reduction", [False, True])
@pytest.mark.parametrize("num_bias", [0, 1, 2])
def test_second_interface(num_bias: int, allow_multiple_reduction: bool) -> None:
    """Both kinds of dispatch, cached ones, and combines to the bit: biases are added in float32, rounded once."""

    def values(tokens: torch.Tensor) -> torch.Tensor:  # [T, K, H], by source rank * TOKENS + token
        seeds = tokens.view(-1, 1) * TOPK + torch.arange(TOPK)
        columns = torch.arange(1, HIDDEN + 1)
        return torch.sin((seeds * 131071 % 997 + 1).float().unsqueeze(2) / 997 * columns).bfloat16()

    def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(parts.shape[0], HIDDEN)
        for k in range(parts.shape[1]):
            total += parts[:, k].float()
        return total

    def combined_like(ids: torch.Tensor, y: torch.Tensor, rounded: bool, bias: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(ids), HIDDEN)
        for rank in range(RANKS):
            part = ordered_sum(torch.where(((ids >= 0) & (ids // LOCAL == rank)).unsqueeze(2), y, 0.0))
            total += part.bfloat16().float() if rounded else part
        return (total + bias).bfloat16()

    def body(group: Any) -> None:
        rank, alignment = group.rank, 8
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, allow_multiple_reduction=allow_multiple_reduction)
        g = torch.Generator().manual_seed(50 + rank)
        x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
        biases = [torch.randn(TOKENS, HIDDEN, generator=g).bfloat16() for _ in range(num_bias)]
        bias = [None, *biases, tuple(biases)][num_bias if num_bias < 2 else -1]
        added = sum((b.float() for b in biases), torch.zeros(TOKENS, HIDDEN))
        ids, weights = routing(rank, masked=True)
        for copied in (True, False):
            given = {"num_experts": EXPERTS, "expert_alignment": alignment, "do_handle_copy": copied}
            _, _, recv_weights, handle, _ = buffer.dispatch(x, ids, weights, **given)
            expanded, none, expanded_weights, expanded_handle, _ = buffer.dispatch(
                x, ids, weights, do_expand=True, **given
            )
            _, cached_ids, _, cached_handle, _ = buffer.dispatch(x, handle=handle)
            again, _, again_weights, _, _ = buffer.dispatch(
                x, topk_weights=weights, handle=expanded_handle, do_expand=True, do_zero_padding=True
            )
            assert none is None and (handle.topk_idx.data_ptr() != ids.data_ptr()) == copied
            assert cached_handle.topk_idx.data_ptr() == handle.topk_idx.data_ptr()
            slots = expanded_handle.recv_src_metadata[:, 2:].long()
            valid = slots[slots >= 0]
            assert torch.equal(again[valid], expanded[valid]) and torch.equal(
                again_weights[valid], expanded_weights[valid]
            )
            tokens = handle.recv_src_metadata[:, 0].long()
            assert torch.equal(tokens, expanded_handle.recv_src_metadata[:, 0].long())
            y = values(tokens)
            y[cached_ids < 0] = 0
            combined, returned, _ = buffer.combine(
                ordered_sum(y).bfloat16(), handle, topk_weights=recv_weights, bias=bias
            )
            mine = values(rank * TOKENS + torch.arange(TOKENS))
            assert torch.equal(combined, combined_like(ids, mine, True, added))
            assert torch.equal(returned, weights)
            spread = torch.zeros(len(expanded), HIDDEN, dtype=torch.bfloat16)
            spread[valid] = y[slots >= 0]
            combined, returned, _ = buffer.combine(spread, expanded_handle, topk_weights=expanded_weights, bias=bias)
            assert torch.equal(combined, combined_like(ids, mine, allow_multiple_reduction, added))
            assert torch.equal(returned, weights)

    all_ranks(RANKS, body)


def test_a_handle_keeps_its_ids() -> None:
    def body(group: Any) -> None:
        buffer, (ids, weights) = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS), routing(group.rank)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
        _, _, want, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS)
        want = want.clone()
        ids.fill_(-1)
        _, _, got, _, _ = buffer.dispatch(x, topk_weights=weights, handle=handle)
        assert torch.equal(got, want)

    all_ranks(RANKS, body)
