"""Buffer(enable_shrink=True), as DeepEP's test of it: ranks are lost before their first call, before a combine, and
before the buffer is cleaned; the others go on, with the shapes of all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer
from moecomm.compat.deep_ep.absent import Presence
from moecomm.ranks.rendezvous import rendezvous
from tests.compat.test_nixl_ep import until_there
from tests.conftest import Ranks

RANKS, TOKENS, HIDDEN, TOPK = 5, 6, 256, 2
EXPERTS = 2 * RANKS


def opened(group: Any) -> Buffer:
    return Buffer(group, 0, 1 << 20, low_latency_mode=True, enable_shrink=True)


def shrink(rank: int, group: Any, lost_at: dict[str, int]) -> list[int]:
    """Returns the ranks that are masked at the end."""
    buffer, lost = opened(group), set()
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=g).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.randint(1, 4, (TOKENS, TOPK), generator=g).float()

    def is_lost(call: str) -> bool:
        lost.update({lost_at[call]} if call in lost_at else ())
        return rank in lost

    def check_mask() -> None:
        status = torch.full((RANKS,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert set(status.nonzero().flatten().tolist()) == lost

    for nth in range(3):
        if is_lost("dispatch"):
            break
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=nth % 2 == 1
        )
        if hook is not None:
            hook()
        assert rows.shape == (2, RANKS * TOKENS, HIDDEN)
        check_mask()
        if is_lost("combine"):
            break
        out, *_ = buffer.low_latency_combine(rows.clone(), ids, weights, handle)
        check_mask()
        there = torch.tensor([rank not in lost for rank in range(RANKS)])[ids // 2]
        assert torch.equal(out, (x.float() * (weights * there).sum(dim=1, keepdim=True)).bfloat16())
        if is_lost("clean"):
            break
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
        check_mask()
    buffer.destroy()
    return sorted(lost)


@pytest.mark.parametrize(
    "lost_at", [{"dispatch": 1, "combine": 3, "clean": 0}, {"dispatch": 0, "clean": 1}, {"clean": 4}], ids=str
)
def test_ranks_are_lost(lost_at: dict[str, int], ranks: Ranks) -> None:
    found = ranks.run(RANKS, shrink, lost_at)
    assert [masked for rank, masked in enumerate(found) if rank not in lost_at.values()] == [
        sorted(lost_at.values())
    ] * (RANKS - len(lost_at))


def late(rank: int, group: Any, directory: Path) -> str:
    """The last rank comes to a meeting that is over."""
    presence = Presence(rendezvous(group), 0.5 if rank == 0 else 60.0)
    try:
        if rank == 2:
            until_there(directory / "over")
        presence.meet("a call")
    except moecomm.Excluded as error:
        return str(error.ranks)
    finally:
        (directory / "over").touch()
    return "came"


def test_a_late_rank_is_told(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, late, tmp_path)
    assert found[:1] == ["came"]
    assert found[2] in ("(0, 1)", "(0,)")


def different(rank: int, group: Any) -> None:
    x, ids = torch.zeros(1, HIDDEN).bfloat16(), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(moecomm.Mismatch, match=r"per_rank=[45].*per_rank=[45]"):
        opened(group).low_latency_dispatch(x, ids, 4 + rank, 2)


def test_other_sizes_are_named(ranks: Ranks) -> None:
    ranks.run(2, different)
