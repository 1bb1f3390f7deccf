"""Combine across domains by kernels, of tokens with many rows on a rank, through rings that the tokens fill often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from .machine import Machine

RANKS, EXPERTS, TOPK, TOKENS = 2, 16, 8, 160
CHUNK = 8  # tokens
HIDDEN = 1032  # of float32: three pieces, the last not a whole one
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": torch.float32}


def call(rank: int) -> dict[str, Any]:
    """Make tokens with three or more rows on a rank, whose sums in another order have other bits."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    assert int(((ids < EXPERTS // RANKS).sum(1) >= 3).sum()) > TOKENS // 2
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    return {"x": x, "topk_idx": ids, "topk_weights": torch.rand(TOKENS, TOPK, generator=g), "layout": "expert"}


@pytest.mark.parametrize("weighted", few([True, False], True))
def test_rows_are_added_in_the_order_of_k(
    weighted: bool, machine: Machine, forwarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product and each sum is rounded.  A row waits until the one that had its place before is pulled."""
    calls, scales = [call(rank) for rank in range(RANKS)], torch.rand(2048, 1, generator=torch.Generator())
    outs = []
    for by_kernels in (False, True):  # or by the host executor
        if by_kernels:
            monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.in_chunks(CHUNK)))
        with LocalBuffers(RANKS, domain_ranks=1, hidden=HIDDEN, **SIZES, backend="host") as ranks:
            assert ranks.buffers[0].rounds.session.context.shape.ring_tokens < TOKENS
            try:
                routed = ranks.dispatch(calls)
                ys = [here.x * scales[: len(here.x)] for here in routed]  # rows of a token differ
                outs.append(
                    ranks.combine(
                        [
                            {"y": y, "handle": here.handle, "weighted": weighted}
                            for y, here in zip(ys, routed, strict=True)
                        ]
                    )
                )
            finally:
                machine.forget()
    assert all(map(torch.equal, *outs)) and all(bool(out.any()) for out in outs[0])
