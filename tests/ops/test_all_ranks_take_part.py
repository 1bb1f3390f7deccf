"""Backward passes in which every rank takes part: also one whose experts got no token, and one with frozen tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base.protocol import LAYOUTS

from ..backends.conftest import all_ranks
from ..few import few

RANKS, HIDDEN, EXPERTS, TOPK, TOKENS = 3, 8, 6, 2, 4
LOCAL = EXPERTS // RANKS
STARVED = 2  # the rank whose experts no token picks


def opened(group: Any, **settings: Any) -> moecomm.Buffer:
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    return moecomm.Buffer(group, **sizes, dtype=torch.float32, backend="host", timeout_s=20, **settings)


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers, whose sums and products have no rounding; every token picks the experts of the first ranks."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=g).float()
    idx = torch.rand(TOKENS, EXPERTS - LOCAL, generator=g).argsort(dim=1)[:, :TOPK]
    return x, idx, torch.randint(1, 4, (TOKENS, TOPK), generator=g).float()


def scale_of(rank: int) -> torch.Tensor:
    return torch.arange(1.0, LOCAL + 1) + 10 * rank


def experts(routed: ops.Dispatched, rows: torch.Tensor, layout: str, scale: torch.Tensor) -> torch.Tensor:
    """A loop over the experts that got tokens, as the eager experts of most models are."""
    y = torch.zeros_like(rows)
    if layout == "flat":
        assert routed.topk_idx is not None and routed.topk_weights is not None
        for e in range(LOCAL):
            at, k = (routed.topk_idx == e).nonzero(as_tuple=True)
            if len(at):
                y = y.index_add(0, at, rows[at] * scale[e] * routed.topk_weights[at, k, None])
        return y
    begin = 0
    for e, count in enumerate(routed.tokens_per_expert.tolist()):
        if count and layout == "batched":
            y = y.index_put((torch.tensor(e), torch.arange(count)), rows[e, :count] * scale[e])
        elif count:
            y = y.index_add(0, torch.arange(begin, begin + count), rows[begin : begin + count] * scale[e])
        begin += count
    return y


def expected(rank: int, layout: str, weighted: bool, wanted: str) -> list[torch.Tensor | None]:
    x, idx, weights = given(rank)
    x.requires_grad_("x" in wanted)
    weights.requires_grad_("w" in wanted)
    scale = torch.cat([scale_of(r) for r in range(RANKS)])
    factors = weights if weighted or layout == "flat" else torch.ones_like(weights)
    out = x * (scale[idx] * factors).sum(dim=1, keepdim=True)
    if out.requires_grad:
        (out.sum() + x.sum()).backward()
    return [out.detach(), x.grad, weights.grad]


def same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> bool:
    """Compare gradients; one of zeros may stand for none."""
    zeros = [torch.zeros(()) if g is None else g for g in got], [torch.zeros(()) if w is None else w for w in want]
    return all(bool((g == w).all()) for g, w in zip(*zeros, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("room", ["one round", "chunks"])
@pytest.mark.parametrize("cast", [None, "mxfp8"])  # which has all the numbers of this test
def test_a_rank_whose_experts_got_no_token_has_its_backward_pass(
    layout: Any, weighted: bool, room: str, cast: Any
) -> None:
    def body(group: Any) -> list[list[torch.Tensor | None]]:
        rank, found = group.rank, []
        with opened(group, capacity_factor=math.inf if room == "one round" else 0.5) as buffer:
            for wanted in ("xw", "x", "w"):
                x, idx, weights = given(rank)
                x.requires_grad_("x" in wanted)
                weights.requires_grad_("w" in wanted)
                scale = scale_of(rank).requires_grad_()
                routed = ops.dispatch(buffer, x, idx, weights, layout=layout, quantize=cast)
                assert isinstance(routed.handle, ops.ChunkedHandle) is (room == "chunks")
                assert (rank == STARVED) is (int(routed.tokens_per_expert.sum()) == 0)
                y = experts(routed, routed.x, layout, scale)
                out = ops.combine(y, routed.handle, weighted=weighted, grad_wire=cast)
                (out.sum() + x.sum()).backward()
                found.append([out.detach(), x.grad, weights.grad])
                assert buffer.rounds.flight.rounds % 4 == 0 or room == "chunks"
        return found

    for rank, results in enumerate(all_ranks(RANKS, body)):
        for wanted, got in zip(("xw", "x", "w"), results, strict=True):
            assert same(got, expected(rank, layout, weighted, wanted)), (rank, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repeated_dispatch_has_its_backward_pass_there_too(layout: Any) -> None:
    def body(group: Any) -> list[torch.Tensor | None]:
        with opened(group) as buffer:
            x, idx, weights = given(group.rank)
            first, x = x.clone().requires_grad_(), (2 * x).requires_grad_()
            routed = ops.dispatch(buffer, first, idx, weights, layout=layout)
            rows = ops.dispatch_again(x, routed.handle)
            out = ops.combine(experts(routed, rows, layout, scale_of(group.rank)), routed.handle)
            (out.sum() + x.sum()).backward()
            assert first.grad is not None and not first.grad.any()
            return [x.grad]

    for rank, got in enumerate(all_ranks(RANKS, body)):
        assert same(got, expected(rank, layout, True, "x")[1:2])


def _first_rank_alone(group: Any, call: str, alone: str) -> None:
    """One rank wants gradients that the others do not want: every rank hears of it in the forward pass."""
    x, idx, weights = given(group.rank)
    tensors = {"x": x, "topk_weights": weights, "w13": torch.ones(LOCAL, 8, HIDDEN), "w2": torch.ones(LOCAL, HIDDEN, 4)}
    x.requires_grad_(alone == "topk_weights beside x")
    if group.rank == 0:
        tensors[alone.split()[0]].requires_grad_()
    with opened(group) as buffer:
        with torch.no_grad():
            routed = ops.dispatch(buffer, x, idx, weights)
        y = routed.x.detach().requires_grad_(group.rank == 0)
        calls = {
            "dispatch": lambda: ops.dispatch(buffer, x, idx, weights),
            "dispatch in MXFP8": lambda: ops.dispatch(buffer, x, idx, weights, quantize="mxfp8"),
            "dispatch_again": lambda: ops.dispatch_again(x, routed.handle),
            "combine": lambda: ops.combine(y, routed.handle),
            "moe": lambda: ops.moe(buffer, x, idx, weights, tensors["w13"], tensors["w2"]),
        }
        with pytest.raises(moecomm.Mismatch, match="all ranks must agree") as raised:
            calls[call]()
        of_weights = alone == "topk_weights beside x"
        assert raised.value.field == ("weight_grads given" if of_weights else "gradients wanted")
        with torch.no_grad(), pytest.raises(moecomm.OutOfStep, match="made different calls"):
            calls["dispatch"]()


@pytest.mark.parametrize(
    ("call", "alone"),
    few(
        [
            *(("dispatch", alone) for alone in ("x", "topk_weights", "topk_weights beside x")),
            *(("dispatch in MXFP8", alone) for alone in ("x", "topk_weights", "topk_weights beside x")),
            ("dispatch_again", "x"),
            ("combine", "x"),
            *(("moe", alone) for alone in ("x", "topk_weights", "w13", "w2")),
        ],
        ("dispatch", "topk_weights beside x"),
        ("dispatch in MXFP8", "topk_weights"),
        ("combine", "x"),
        ("moe", "w13"),
    ),
)
def test_ranks_that_want_other_gradients_hear_of_it_in_the_forward_pass(call: str, alone: str) -> None:
    all_ranks(RANKS, lambda group: _first_rank_alone(group, call, alone))
