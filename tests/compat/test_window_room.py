"""A window whose free memory lies in pieces: no rank runs out of it while callers keep a few outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from moecomm.ranks.rendezvous import Alone

from ..backends.conftest import all_ranks

EXPERTS, TOPK, TOKENS, HIDDEN, STEPS, KEPT = 16, 4, 64, 256, 60, 4
ALIGNMENTS = (1, 128)
Round = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def elastic(group: Any) -> Round:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)

    def dispatch(step: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        alignment = ALIGNMENTS[step % 2]
        rows, _, _, handle, _ = buffer.dispatch(
            x, ids, num_experts=EXPERTS, do_expand=True, expert_alignment=alignment, do_zero_padding=True
        )
        assert len(rows) == handle.num_expanded_tokens
        return rows

    return dispatch


def hybrid(group: Any) -> Round:
    buffer = HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // group.ranks)

    def dispatch(step: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = buffer.dispatch_with_permute(
            hidden=x, topk_idx=ids, num_of_experts=EXPERTS, pad_multiple=ALIGNMENTS[step % 2]
        )[0]
        return rows

    return dispatch


def normal(group: Any) -> Round:
    buffer = Buffer(group)

    def dispatch(step: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).int()
        worst = group.ranks * TOKENS * (step % 2)
        rows, *_ = buffer.dispatch(x, topk_idx=ids, num_tokens_per_expert=counts, num_worst_tokens=worst)
        return rows if worst == 0 else rows[:0]  # where it is not said how many came

    return dispatch


@pytest.mark.parametrize("make", [elastic, hybrid, normal])
def test_outputs_of_other_sizes_in_turn(make: Callable[[Any], Round]) -> None:
    """Each rank keeps other outputs, and gets more rows or fewer, as routings make it."""

    def body(group: Any) -> None:
        dispatch, g = make(group), torch.Generator().manual_seed(group.rank)
        kept: list[tuple[int, torch.Tensor]] = []
        for step in range(STEPS):
            experts = EXPERTS // 2 if torch.rand(1, generator=g) < 0.5 else EXPERTS  # those of the first rank, or all
            ids = torch.rand(TOKENS, experts, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
            kept.append((step, dispatch(step, torch.full((TOKENS, HIDDEN), step + 1.0), ids)))
            if len(kept) > KEPT:
                kept.pop(int(torch.randint(KEPT, (1,), generator=g)))
        for step, rows in kept:
            assert ((rows == step + 1) | (rows == 0)).all()

    all_ranks(2, body)


def test_rows_that_are_dropped_leave_one_piece_behind_their_handle() -> None:
    with moecomm.Buffer(Alone(), hidden=HIDDEN, num_experts=2, topk=1, max_tokens=TOKENS, backend="host") as buffer:
        x, ids = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.zeros(TOKENS, 1, dtype=torch.int64)
        handles = []
        for _ in range(5):
            handles.append(buffer.dispatch(x, ids).handle)
            memory = buffer.rounds.memory
            assert memory.arena.largest_free > memory.nbytes - memory.used - x.nbytes // 2, (
                "but for what was trimmed of a handle"
            )
