"""Skewed routing, from even to all tokens at one rank: rounds with and without room have the same results."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import moecomm
from moecomm.dispatch.routed import ChunkedHandle

from .backends.conftest import run_ranks
from .few import few
from .test_capacity import SIZES, contents


@pytest.mark.parametrize("layout", few(["expert", "flat", "batched"], "expert"))
def test_all_tokens_of_64_ranks_to_one(layout: str) -> None:
    """The worst case: 64 times what is expected, and the result of a window that has room for it."""
    ranks, tokens = 64, 8
    sizes: dict[str, Any] = {**SIZES, "num_experts": 128, "topk": 2, "max_tokens": tokens, "timeout_s": 100}

    def body(group: Any) -> tuple[torch.Tensor, int, bool]:
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(tokens, SIZES["hidden"], generator=g).bfloat16()
        ids = torch.tensor([[46, 47]]).expand(tokens, 2).contiguous()
        weights = torch.rand(tokens, 2, generator=g)
        with moecomm.Buffer(group, **sizes, capacity_factor=1.0) as buffer:
            routed = buffer.dispatch(x, ids, weights, layout=layout)  # type: ignore[call-overload]
            out = buffer.combine(routed.x, routed.handle, wire="exact")
            scale = weights.sum(1, keepdim=True) if layout != "flat" else 1
            torch.testing.assert_close(out.float(), x.float() * scale, rtol=0.01, atol=0.01)
            return contents(routed.src), int(routed.num_rows), isinstance(routed.handle, ChunkedHandle)

    found = run_ranks(ranks, body)
    arriving = ranks * tokens * (1 if layout == "flat" else 2)
    assert [number for _, number, _ in found] == [arriving if rank == 23 else 0 for rank in range(ranks)]
    assert all(chunked for _, _, chunked in found)
    want = [[source, token] for source in range(ranks) for token in range(tokens)]
    src = found[23][0].view(-1, ranks * tokens, 2)  # by expert
    assert all(rows.tolist() == want for rows in src)


@pytest.mark.parametrize("times", [1, 4, 16])
def test_skew_of_16_ranks(times: int) -> None:
    """One rank gets a multiple of the others' tokens.  Rounds with and without room have the same results."""
    ranks, experts, topk = 16, 32, 4
    sizes = {**SIZES, "num_experts": experts, "topk": topk, "max_tokens": 16}

    def body(group: Any, factor: float) -> tuple[torch.Tensor, bool]:
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(16, SIZES["hidden"], generator=g).bfloat16()
        likely = torch.ones(16, experts)
        likely[:, :2] *= times
        ids = torch.multinomial(likely, topk, generator=g)
        with moecomm.Buffer(group, **sizes, capacity_factor=factor) as buffer:
            routed = buffer.dispatch(x, ids, torch.rand(16, topk, generator=g))
            return buffer.combine(routed.x, routed.handle), isinstance(routed.handle, ChunkedHandle)

    want = run_ranks(ranks, lambda group: body(group, math.inf))
    got = run_ranks(ranks, lambda group: body(group, 1.5))
    assert all(torch.equal(w, g) for (w, _), (g, _) in zip(want, got, strict=True))
    assert {chunked for _, chunked in got} == {times > 1}


@pytest.mark.parametrize(
    ("times", "layout"),
    few(itertools.product([1, 4, 16, 64], ["expert", "flat", "batched"]), (1, "expert"), (16, "expert")),
)
def test_skew_of_64_ranks(times: int, layout: str) -> None:
    """Rank 0 gets exactly so many times the mean, and the others share what is left."""
    ranks, tokens = 64, 32
    sizes: dict[str, Any] = {**SIZES, "num_experts": 2 * ranks, "topk": 2, "max_tokens": tokens, "timeout_s": 100}

    def body(group: Any, factor: float) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(tokens, SIZES["hidden"], generator=g).bfloat16()
        number = tokens * group.rank + torch.arange(tokens)  # of a token, among those of all ranks
        owner = torch.where(number % ranks < times, 0, 1 + number % (ranks - 1))
        ids = torch.stack([2 * owner, 2 * owner + 1], dim=1)
        with moecomm.Buffer(group, **sizes, capacity_factor=factor) as buffer:
            routed = buffer.dispatch(x, ids, torch.rand(tokens, 2, generator=g), layout=layout)  # type: ignore[call-overload]
            out = buffer.combine(routed.x, routed.handle)
            counts = contents(routed.tokens_per_expert)
            return out, counts, int(routed.num_rows), isinstance(routed.handle, ChunkedHandle)

    want = run_ranks(ranks, lambda group: body(group, math.inf))
    got = run_ranks(ranks, lambda group: body(group, 1.5))
    mean = tokens * (1 if layout == "flat" else 2)
    assert got[0][2] == times * mean and sum(number for *_, number, _ in got) == ranks * mean
    for (out, counts, number, _), (same, *about, _) in zip(want, got, strict=True):
        assert torch.equal(out, same) and torch.equal(counts, about[0]) and number == about[1]
    assert not any(chunked for *_, chunked in want)
    assert {chunked for *_, chunked in got} == {times > 1}
