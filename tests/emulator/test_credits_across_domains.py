"""Combine across domains by kernels, through rings with few places, with rows that some ranks publish in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from .machine import Machine

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 3, 64, 160
CHUNK = 4  # tokens
PUBLISH = {"some": (0, 3), "none": (), "all": (0, 1, 2, 3)}
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}


def call(rank: int) -> dict[str, Any]:
    """Make tokens of small whole numbers, so that sums are exact."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=g).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    return {"x": x, "topk_idx": ids, "topk_weights": torch.ones(TOKENS, TOPK), "layout": "flat"}


@pytest.mark.parametrize("in_place", few([*PUBLISH], "some"))
def test_rings_that_fill_often(
    in_place: str, machine: Machine, forwarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that publish their rows need no credits, those that stage them wait for each."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.in_chunks(CHUNK)))
    calls = [call(rank) for rank in range(RANKS)]
    with LocalBuffers(RANKS, domain_ranks=2, **SIZES, backend="host") as ranks:
        assert ranks.buffers[0].rounds.session.context.shape.ring_tokens < TOKENS
        try:
            routed = ranks.dispatch(calls)
            ys = []
            for rank, (buffer, here) in enumerate(zip(ranks.buffers, routed, strict=True)):
                y = buffer.empty(here.handle) if rank in PUBLISH[in_place] else torch.empty_like(here.x)
                ys.append(y.copy_(here.x))
            outs = ranks.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, routed, strict=True)])
        finally:
            machine.forget()
    for given, out in zip(calls, outs, strict=True):
        owners = given["topk_idx"] // (EXPERTS // RANKS)
        copies = (owners[:, :, None] == torch.arange(RANKS)).any(dim=1).sum(dim=1, keepdim=True)
        assert torch.equal(out.float(), given["x"].float() * copies)
