"""Checks that deep_ep's own tests make of its second interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.compat.deep_ep import ElasticBuffer

from ..backends.conftest import all_ranks

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
