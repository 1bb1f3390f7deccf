"""HybridEPBuffer with fewer rows than come: what is dropped, what is flagged, and that nothing waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import HybridEPBuffer
from moecomm.compat.deep_ep.hybrid import indices_to_map

from ..backends.conftest import all_ranks
from .test_no_kernels import Computed

HIDDEN, EXPERTS, RANKS, TOPK = 16, 6, 3, 2
LOCAL = EXPERTS // RANKS


def inputs(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * seed + rank)
    tokens = int(torch.randint(0, 9, (1,), generator=g))
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    ids[torch.rand(tokens, TOPK, generator=g) < 0.2] = -1
    x = torch.arange(tokens).view(-1, 1).expand(tokens, HIDDEN) + 16.0 * rank + 1
    return x.bfloat16(), ids, torch.rand(tokens, TOPK, generator=g) + 0.5


def expected(owner: int, seed: int, budget: int, align: int) -> tuple[list[Any], list[int], bool]:
    """Rows of a rank, None where there is padding; what each expert keeps; whether anything was dropped."""
    rows: list[Any] = []
    kept = []
    dropped = False
    for e in range(owner * LOCAL, (owner + 1) * LOCAL):
        kept.append(0)
        for source in range(RANKS):
            for token, row in enumerate(inputs(source, seed)[1].tolist()):
                if e not in row:
                    continue
                if len(rows) < budget // align * align:
                    rows.append((source, token, row.index(e)))
                    kept[-1] += 1
                else:
                    dropped = True
        rows += [None] * (-len(rows) % align)
    return rows, kept, dropped


@pytest.mark.parametrize("by_map", [False, True])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_rows_behind_the_budget_are_dropped_and_flagged(seed: int, align: int, by_map: bool) -> None:
    def body(group: Any) -> bool:
        buffer, rank = HybridEPBuffer(group, HIDDEN, 9, LOCAL), group.rank
        x, ids, weights = inputs(rank, seed)
        routing: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": EXPERTS}
        if by_map:
            routing_map, probs = indices_to_map(ids, weights, len(x), EXPERTS)
            routing = {"routing_map": routing_map, "probs": probs}
        budgets = [[8, 0, 12], [40, 4, 16], [0, 0, 0], [7, 6, 5], [60, 60, 60]][seed]
        with Computed() as seen:
            hidden, row_probs, _, counts, handle = buffer.dispatch_with_permute(
                hidden=x,
                pad_multiple=align,
                num_permuted_tokens=budgets[rank],
                non_blocking=True,
                **routing,
            )
        assert "_local_scalar_dense" not in seen.names, "the host reads nothing"
        wanted = [expected(r, seed, budgets[r], align) for r in range(RANKS)]
        rows, kept, dropped = wanted[rank]
        assert len(hidden) == budgets[rank] and row_probs is not None
        assert counts.tolist() == [-(-n // align) * align for n in kept]
        assert len(handle) == 11 and handle[-1].dtype is torch.int32 and handle[-1].tolist() == [int(dropped)]
        assert handle[7].tolist() == kept and handle[8] == len(x) and handle[-2] is buffer.configurer.buffer_config
        for row, origin in enumerate(rows):
            if origin is not None:
                source, token, k = origin
                sent, _, their_weights = inputs(source, seed)
                assert torch.equal(hidden[row], sent[token]) and row_probs[row] == their_weights[token, k]
            elif row < budgets[rank]:
                assert (hidden[row] == 0).all() and row_probs[row] == 0
        survived = torch.zeros(len(x), EXPERTS)
        for owner, (their_rows, _, _) in enumerate(wanted):
            for source, token, k in filter(None, their_rows):
                if source == rank:
                    survived[token, ids[token, k]] = weights[token, k]
                    assert int(ids[token, k]) // LOCAL == owner
        combined, returned = buffer.combine_with_unpermute(hidden=hidden, probs=row_probs, handle=handle)
        assert torch.equal(combined, x * (survived > 0).sum(dim=1, keepdim=True)) and torch.equal(returned, survived)
        again, *_ = buffer.dispatch_with_permute(
            hidden=x * 2, handle=handle, pad_multiple=align, num_permuted_tokens=budgets[rank]
        )
        used = [row for row, origin in enumerate(rows) if origin is not None]
        assert torch.equal(again[used], hidden[used] * 2)
        return dropped

    flags = all_ranks(RANKS, body)
    assert any(flags) == (seed != 4)


def test_without_a_budget_nothing_is_dropped() -> None:
    def body(group: Any) -> None:
        x, ids, _ = inputs(group.rank, 1)
        buffer = HybridEPBuffer(group, HIDDEN, 9, LOCAL)
        *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=EXPERTS)
        assert handle[-1].tolist() == [0]

    all_ranks(RANKS, body)


def test_what_torchtitan_reads_of_a_buffer() -> None:
    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, HIDDEN, 9, LOCAL)
        config = buffer.configurer.buffer_config
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (HIDDEN, 9, 2)
        x = torch.zeros(20 + group.rank, HIDDEN, dtype=torch.bfloat16)
        ids = torch.zeros(len(x), 1, dtype=torch.int64)
        buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=EXPERTS)
        assert config.max_num_of_tokens_per_rank == 22

    all_ranks(RANKS, body)


def test_ids_become_maps() -> None:
    ids = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    routing_map, probs = indices_to_map(ids, torch.tensor([[0.5, 9.0], [1.5, 2.5]]), 2, 3)
    assert routing_map.tolist() == [[False, False, True], [True, True, False]]
    assert probs.tolist() == [[0.0, 0.0, 0.5], [1.5, 2.5, 0.0]]
    assert indices_to_map(ids, None, 2, 3)[1] is None
    with pytest.raises(moecomm.BadInput, match="topk_idx"):
        indices_to_map(ids, None, 3, 3)
