"""The layer over several ranks, in every layout, against the layer on one rank, and that against float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import moecomm
from moecomm.base.protocol import LAYOUTS
from moecomm.fused.weights import expert_weights
from moecomm.router import Router
from moecomm.tools.demo_layer import MoELayer, batched_experts, error_bound, reference

HIDDEN, EXPERTS, TOPK, INTERMEDIATE = 64, 16, 3, 24


def weights_of(experts: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [expert_weights(expert, HIDDEN, INTERMEDIATE, seed=1) for expert in experts]


def tokens_of(rank: int, ranks: int) -> torch.Tensor:
    count = [17, 0, 5, 32][rank % 4]
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + rank + ranks)).to(torch.bfloat16)


def run_layers(ranks: int, layout: str) -> list[torch.Tensor]:
    """Every rank's output, the ranks being threads of this process."""

    def one(group: object) -> torch.Tensor:
        gate = Router(HIDDEN, EXPERTS, TOPK, gate="sigmoid", num_groups=4, topk_groups=2, seed=2)
        with moecomm.Buffer(
            group, hidden=HIDDEN, num_experts=EXPERTS, topk=TOPK, max_tokens=32, backend="host"
        ) as buffer:
            local = EXPERTS // ranks
            w13, w2 = (
                torch.stack(w)
                for w in zip(*weights_of(range(buffer.rank * local, (buffer.rank + 1) * local)), strict=True)
            )
            return MoELayer(gate, buffer, w13, w2, layout=layout)(tokens_of(buffer.rank, ranks))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, moecomm.local_ranks(ranks)))


def in_float64(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The layer token by token: the textbook formula."""
    experts = weights_of(range(EXPERTS))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(topk_idx[token].tolist(), topk_weights[token].tolist(), strict=True):
            w13, w2 = (w.double() for w in experts[expert])
            gate, up = w13[:INTERMEDIATE] @ x[token].double(), w13[INTERMEDIATE:] @ x[token].double()
            out[token] += weight * (w2 @ (gate * torch.sigmoid(gate) * up))
    return out


def test_the_reference_is_the_textbook_formula() -> None:
    x = tokens_of(3, 1)
    routing = Router(HIDDEN, EXPERTS, TOPK, seed=2)(x)
    out, magnitude = reference(x, *routing, weights_of(range(EXPERTS)))
    expected = in_float64(x, *routing)
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (magnitude >= out.abs() * (1 - 1e-5)).all()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_single_rank_layer(layout: str, ranks: int) -> None:
    gate = Router(HIDDEN, EXPERTS, TOPK, gate="sigmoid", num_groups=4, topk_groups=2, seed=2)
    for rank, out in enumerate(run_layers(ranks, layout)):
        x = tokens_of(rank, ranks)
        assert out.shape == x.shape and out.dtype == x.dtype
        if not len(x):
            continue
        expected = reference(x, *gate(x), weights_of(range(EXPERTS)))
        error, bound = (out.float() - expected.out).abs(), error_bound(expected, torch.bfloat16)
        assert (error <= bound).all(), f"rank {rank}: {(error / bound).max():.2f} of the bound"


def test_the_bound_is_tight_enough_to_see_a_small_mistake() -> None:
    x = tokens_of(3, 1)
    topk_idx, topk_weights = Router(HIDDEN, EXPERTS, TOPK, seed=2)(x)
    experts = weights_of(range(EXPERTS))
    expected = reference(x, topk_idx, topk_weights, experts)
    bound = error_bound(expected, torch.bfloat16)
    assert bound.mean() < 0.02 * expected.out.abs().mean()
    nudged = reference(x, topk_idx, topk_weights * 1.05, experts).out
    swapped = reference(x, topk_idx.flip(1), topk_weights, experts).out
    for wrong in (nudged, swapped):
        assert ((wrong - expected.out).abs() > bound).any(dim=1).all(), "a token with a wrong output passed"


def test_a_batch_computes_what_single_experts_do() -> None:
    """batched_experts takes a few experts at once; rows past an expert's count are not read and may hold anything."""
    local, room = 5, 9
    counts = torch.tensor([9, 0, 3, 1, 4], dtype=torch.int32)
    x = torch.randn(local, room, HIDDEN, generator=torch.Generator().manual_seed(0))
    for expert, count in enumerate(counts.tolist()):
        x[expert, count:] = float("nan")
    w13, w2 = (torch.stack(w) for w in zip(*weights_of(range(local)), strict=True))
    routed = SimpleNamespace(x=x, tokens_per_expert=counts)
    y = batched_experts(routed, w13, w2, at_once=2)  # type: ignore[arg-type]
    for expert, count in enumerate(counts.tolist()):
        gate, up = (x[expert, :count] @ w13[expert].T).chunk(2, dim=1)
        expected = (gate * torch.sigmoid(gate) * up) @ w2[expert].T
        assert torch.allclose(y[expert, :count], expected, atol=1e-5)


def test_expert_weights_depend_on_seed_and_expert_alone() -> None:
    again, other = expert_weights(3, HIDDEN, INTERMEDIATE, seed=1), expert_weights(4, HIDDEN, INTERMEDIATE, seed=1)
    w13, w2 = expert_weights(3, HIDDEN, INTERMEDIATE, seed=1)
    assert torch.equal(w13, again[0]) and torch.equal(w2, again[1])
    assert not torch.equal(w13, other[0])
    assert w13.shape == (2 * INTERMEDIATE, HIDDEN) and w2.shape == (HIDDEN, INTERMEDIATE)
