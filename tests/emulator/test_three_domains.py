"""Combine over three domains of two ranks by kernels: sums are added in the order of domains."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from .machine import Machine

RANKS, SIZE, EXPERTS, TOPK, TOKENS = 6, 2, 12, 8, 24
SIZES: dict[str, Any] = {
    "hidden": 1032,  # of float32: three pieces, the last not a whole one
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": TOKENS,
    "dtype": torch.float32,
}


def call(rank: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    ranks_of = torch.stack([(ids // 2 == r).any(1) for r in range(RANKS)], dim=1)
    own = ranks_of[:, rank // SIZE * SIZE : rank // SIZE * SIZE + SIZE].sum(1)
    domains = ranks_of.reshape(TOKENS, -1, SIZE).any(2).sum(1)
    assert int(((own == 2) & (domains == 3)).sum()) > TOKENS // 4, "two rows of its own between sums of others"
    x = torch.randn(TOKENS, SIZES["hidden"], generator=g)
    return {"x": x, "topk_idx": ids, "topk_weights": torch.rand(TOKENS, TOPK, generator=g), "layout": "expert"}


def test_domains_are_added_in_order(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum is rounded, so the host executor's bits tell the order."""

    def run(args: Sequence[Any]) -> None:
        machine.run_all(args)

    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    calls, scales = [call(rank) for rank in range(RANKS)], torch.rand(2048, 1, generator=torch.Generator())
    outs = []
    for by_kernels in (False, True):
        if by_kernels:
            monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=run))
        with LocalBuffers(RANKS, domain_ranks=SIZE, **SIZES, backend="host") as ranks:
            try:
                routed = ranks.dispatch(calls)
                ys = [here.x * scales[: len(here.x)] for here in routed]  # rows of a token differ
                outs.append(
                    ranks.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, routed, strict=True)])
                )
            finally:
                machine.forget()
    assert all(map(torch.equal, *outs)) and all(bool(out.any()) for out in outs[0])
