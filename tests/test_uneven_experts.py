"""Ranks with different numbers of experts: the first E % R ranks have one more than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import nn, ops
from moecomm.base.experts import experts_of, most_experts, owners_of
from moecomm.dispatch import reference
from moecomm.testing import LocalBuffers, check_case, random_case

from .backends.conftest import run_ranks
from .few import few
from .ops.plain import formula

SHAPES = [(6, 10), (3, 4), (4, 7), (5, 14), (8, 9), (2, 3)]


def test_every_expert_has_one_owner() -> None:
    for ranks in range(1, 9):
        for experts in range(ranks, 30):
            dealt = [experts_of(rank, experts, ranks) for rank in range(ranks)]
            assert [e for mine in dealt for e in mine] == list(range(experts))
            sizes = [len(mine) for mine in dealt]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] == (experts % ranks > 0)
            assert sizes[0] == most_experts(experts, ranks)
            ids = torch.arange(-1, experts)
            want = [-1, *(rank for rank, mine in enumerate(dealt) for _ in mine)]
            assert owners_of(ids, experts, ranks).tolist() == want


@pytest.mark.parametrize("domains", [1, 2])
@pytest.mark.parametrize(("ranks", "experts"), few(SHAPES, (6, 10), (4, 7)))
def test_rounds_match_the_reference(ranks: int, experts: int, domains: int) -> None:
    """All layouts and options that 60 seeds draw."""
    if ranks % domains:
        return
    sizes: dict[str, Any] = {"ranks": ranks, "hidden": 32, "num_experts": experts, "topk": 3, "max_tokens": 12}
    near = ranks // domains if domains > 1 else None
    with LocalBuffers(**sizes, domain_ranks=near, backend="host", timeout_s=30) as local:
        assert [len(b.local_experts) for b in local.buffers] == [
            len(experts_of(r, experts, ranks)) for r in range(ranks)
        ]
        for seed in range(60):
            check_case(local, random_case(seed, **sizes, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
@pytest.mark.parametrize("overflow", [None, "drop"])
def test_rows_that_have_no_room(layout: str, overflow: str | None) -> None:
    """In chunks with the bits of one round; dropped, they always fit."""
    ranks, experts, topk, tokens = 4, 7, 2, 16
    sizes: dict[str, Any] = {"hidden": 16, "num_experts": experts, "topk": topk, "max_tokens": tokens, "timeout_s": 20}

    def body(group: Any, factor: float) -> tuple[torch.Tensor, int]:
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(tokens, 16, generator=g).bfloat16()
        ids = torch.stack([torch.randint(0, 4, (tokens,), generator=g), torch.randint(4, 7, (tokens,), generator=g)], 1)
        ids[::2, 0] = 3
        weights = torch.rand(tokens, topk, generator=g)
        with moecomm.Buffer(group, **sizes, capacity_factor=factor, backend="host") as buffer:
            how: dict[str, Any] = {"layout": layout, "overflow": overflow, "sync": overflow is None}
            routed = buffer.dispatch(x, ids, weights, **how)
            out = buffer.combine(routed.x, routed.handle, wire="exact")
            return out, int(routed.dropped) if routed.dropped is not None else 0

    want = run_ranks(ranks, lambda group: body(group, 100.0))
    got = run_ranks(ranks, lambda group: body(group, 0.6))
    if overflow == "drop":
        assert sum(dropped for _, dropped in got) > 0
    else:
        assert all(torch.equal(one, other) for (one, _), (other, _) in zip(want, got, strict=True))


@pytest.mark.parametrize("fused_call", [False, True])
def test_layers(fused_call: bool) -> None:
    """nn.ExpertParallel and Buffer.moe against the formula, with gradients, and states that are cut and gathered."""
    ranks, hidden, inner, experts, topk, tokens = 3, 16, 8, 7, 2, 9
    whole = nn.Experts(range(experts), hidden, inner, seed=3, dtype=torch.float32)
    # Without gradients: a thread that begins a graph of a parameter waits for the GIL with the parameter's mutex, for
    # which another thread may wait with the GIL (torch 2.13).
    all_w13, all_w2 = whole.w13.detach(), whole.w2.detach()

    def body(group: Any) -> None:
        g = torch.Generator().manual_seed(group.rank)
        x = torch.randn(tokens, hidden, generator=g)
        ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)])
        weights = torch.rand(tokens, topk, generator=g)
        sizes: dict[str, Any] = {"hidden": hidden, "num_experts": experts, "topk": topk, "max_tokens": tokens}
        with moecomm.Buffer(group, **sizes, dtype=torch.float32, backend="host", timeout_s=20) as buffer:
            layer = nn.ExpertParallel(group, **sizes, intermediate=inner, buffer=buffer, seed=3, dtype=torch.float32)
            mine = experts_of(group.rank, experts, ranks)
            assert buffer.local_experts == mine
            assert torch.equal(layer.experts.w13, all_w13[mine.start : mine.stop])
            want = formula(x.double(), ids, weights.double(), all_w13.double(), all_w2.double())
            if fused_call:
                out = buffer.moe(x, ids, weights, layer.experts.w13.detach(), layer.experts.w2.detach())
            else:
                x.requires_grad_()
                out = layer(x, ids, weights)
                out.sum().backward()
                assert x.grad is not None and x.grad.abs().sum() > 0
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)

    assert run_ranks(ranks, body) == [None] * ranks


def test_states_are_cut_and_shaped_alike() -> None:
    state = {"experts.w13": torch.arange(7.0)[:, None], "gate.weight": torch.ones(2)}
    parts = [nn.shard_state(state, rank, 3)["experts.w13"] for rank in range(3)]
    assert [len(part) for part in parts] == [3, 2, 2] and torch.equal(torch.cat(parts), state["experts.w13"])


def test_operators_have_the_shapes_of_their_rank() -> None:
    def body(group: Any) -> tuple[int, ...]:
        sizes: dict[str, Any] = {"hidden": 16, "num_experts": 5, "topk": 2, "max_tokens": 4, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, backend="host", timeout_s=20) as buffer:
            x, ids = torch.ones(4, 16), torch.tensor([[0, 4]] * 4)
            sent = ops.dispatch(buffer, x, ids, layout="batched", max_rows=8)
            assert torch.equal(ops.combine(sent.x, sent.handle), 2 * x)
            return (*sent.x.shape[:2], *sent.tokens_per_expert.tolist())

    assert run_ranks(2, body) == [(3, 8, 8, 0, 0), (2, 8, 0, 8)]


def test_fewer_experts_than_ranks_are_refused() -> None:
    def body(group: Any) -> str:
        with pytest.raises(moecomm.BadInput) as caught:
            moecomm.Buffer(group, hidden=16, num_experts=2, topk=1, max_tokens=4, backend="host", timeout_s=20)
        return caught.value.argument

    assert run_ranks(3, body) == ["num_experts"] * 3


def test_the_reference_deals_experts_likewise() -> None:
    x, ids = torch.arange(5.0)[:, None], torch.arange(5)[:, None]
    found = reference.dispatch([x, x[:0]], [ids, ids[:0]], [None, None], num_experts=5)
    assert [len(arrived.x) for arrived in found] == [3, 2]
