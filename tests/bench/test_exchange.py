"""The peers' rows: all_to_all_single delivers and adds what moecomm does."""

from __future__ import annotations

from typing import Any

import torch

import moecomm
from moecomm_bench.exchange import TorchExchange, by_expert, by_rank

from ..conftest import Ranks

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 3, 37, 64, 12, 4


def routing(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    ids[3:5, 1] = -1
    return x, ids, torch.rand(TOKENS, TOPK, generator=generator)


def _compare(rank: int, group: Any) -> tuple[bool, bool, float]:
    x, ids, weights = routing(rank)
    flat = TorchExchange(x, by_rank(ids, EXPERTS, RANKS), None, group)
    rows = flat.dispatch()
    sums = flat.combine(rows)
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    with moecomm.Buffer(group, **sizes, backend="host") as buffer:
        routed = buffer.dispatch(x, ids, weights, layout="flat")
        same_rows = torch.equal(routed.x, rows)
        same_sums = torch.equal(buffer.combine(routed.x, routed.handle), sums)
    expert = TorchExchange(x, by_expert(ids, EXPERTS, RANKS), weights, group)
    out = expert.combine(expert.dispatch())
    want = x.double() * (weights * (ids >= 0)).sum(dim=1, keepdim=True)
    error = ((out.double() - want).abs() / (want.abs() + 1e-6)).max()
    return same_rows, same_sums, float(error)


def test_it_delivers_and_adds_what_moecomm_does(ranks: Ranks) -> None:
    for same_rows, same_sums, error in ranks.run(RANKS, _compare):
        assert same_rows and same_sums
        assert error <= 2**-8  # one rounding to bfloat16
