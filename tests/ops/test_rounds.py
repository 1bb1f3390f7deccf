"""Operators and their gradients, element by element against the specification of dispatch and combine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base.protocol import LAYOUTS
from moecomm.combine import reference as combine_reference
from moecomm.dispatch import reference as dispatch_reference
from tests.ops.ranks import Case, case

from ..backends.conftest import all_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arrived_of(
    c: Case, x: list[torch.Tensor], layout: str, alignment: int = 1, max_rows: list[int] | None = None
) -> list[dispatch_reference.Arrived]:
    return dispatch_reference.dispatch(
        x,
        c.topk_idx,
        list(c.topk_weights),
        num_experts=c.num_experts,
        layout=layout,
        expert_alignment=alignment,
        max_tokens=c.max_tokens,
        max_rows=max_rows,
    )


def fullest(c: Case) -> list[int]:
    """Rows that an expert of each rank gets at most."""
    counts = torch.bincount(torch.cat(c.topk_idx).flatten() + 1, minlength=c.num_experts + 1)[1:]
    rows: list[int] = counts.view(c.ranks, -1).amax(dim=1).tolist()
    return rows


def filled(rows: torch.Tensor, like: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """`rows` of the specification, which has as many as arrived, in the shape of an operator's output."""
    full = torch.full(like.shape, fill, dtype=rows.dtype).flatten(0, 1) if like.ndim > rows.ndim else None
    if full is None:
        full = torch.full(like.shape, fill, dtype=rows.dtype)
    full[: len(rows)] = rows
    return full.view(like.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "alignment"), [(1, 1), (2, 4), (3, 1), (4, 16)])
def test_rounds_and_gradients_are_what_the_specification_says(
    layout: str, dtype: torch.dtype, ranks: int, alignment: int
) -> None:
    c = case(ranks, dtype=dtype, seed=ranks)
    room = fullest(c) if layout == "batched" and alignment == 1 else None

    def body(group: Any) -> dict[str, Any]:
        rank = group.rank
        options = {"layout": layout, "expert_alignment": alignment, "max_rows": room and room[rank]}
        with c.buffer(group) as buffer:
            x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
            routed = ops.dispatch(buffer, x, c.topk_idx[rank], weights, **options)
            y = c.drawn(routed.x.shape, rank).requires_grad_()
            out = ops.combine(y, routed.handle)
            grad_out = c.drawn(out.shape, 10 + rank)
            wanted = [y] if layout == "flat" else [y, routed.row_weights]
            grads_of_combine = torch.autograd.grad(out, wanted, grad_out)
            of_weights = routed.topk_weights if layout == "flat" else routed.row_weights
            assert of_weights is not None
            grad_x, grad_row_weights = c.drawn(routed.x.shape, 20 + rank), torch.randn(of_weights.shape)
            grads_of_dispatch = torch.autograd.grad((routed.x, of_weights), (x, weights), (grad_x, grad_row_weights))
            return {
                "routed": routed._replace(handle=None),
                "y": y.detach(),
                "out": out.detach(),
                "grad_out": grad_out,
                "grads_of_combine": grads_of_combine,
                "grads_given": (grad_x, grad_row_weights),
                "grads_of_dispatch": grads_of_dispatch,
            }

    got = all_ranks(ranks, body)
    arrived = arrived_of(c, c.x, layout, alignment, room)

    def cut(rows: torch.Tensor, here: dispatch_reference.Arrived) -> torch.Tensor:
        return (rows.flatten(0, 1) if layout == "batched" else rows)[: len(here.x)]

    outs = combine_reference.combine(
        [cut(g["y"], a) for g, a in zip(got, arrived, strict=True)], arrived, layout=layout
    )
    given = [[cut(g["grads_given"][i], a) for g, a in zip(got, arrived, strict=True)] for i in (0, 1)]
    grad_xs = combine_reference.combine(given[0], arrived, layout=layout, weighted=False)
    grad_weights = combine_reference.combine_weight_grads(given[1], arrived, layout=layout)
    grad_rows = arrived_of(c, [g["grad_out"] for g in got], layout, alignment, room)
    for rank, (g, want, back) in enumerate(zip(got, arrived, grad_rows, strict=True)):
        routed = g["routed"]
        assert room is None or routed.x.shape[1] == room[rank]
        assert torch.equal(routed.x, filled(want.x, routed.x)), f"rank {rank}: x, zeros in padding included"
        assert torch.equal(routed.tokens_per_expert, want.tokens_per_expert)
        assert routed.num_rows.tolist() == [want.num_rows]
        assert torch.equal(routed.src, filled(want.src, routed.src, -1))
        if layout == "flat":
            assert want.topk_idx is not None and want.topk_weights is not None
            assert torch.equal(routed.topk_idx, filled(want.topk_idx, routed.topk_idx, -1))
            assert torch.equal(routed.topk_weights, filled(want.topk_weights, routed.topk_weights))
        else:
            assert want.row_weights is not None
            assert torch.equal(routed.row_weights, filled(want.row_weights, routed.row_weights))
        assert torch.equal(g["out"], outs[rank])
        rows = filled(back.x, routed.x)
        if layout == "flat":
            assert torch.equal(g["grads_of_combine"][0], rows)
        else:
            weights = routed.row_weights.detach()
            grad_y = (rows.float() * weights.unsqueeze(-1)).to(dtype)
            assert torch.equal(g["grads_of_combine"][0], grad_y)
            product = rows.double() * g["y"].double()
            error = (g["grads_of_combine"][1].double() - product.sum(dim=-1)).abs()
            # float32 sums of H products, each rounded: at most H + 1 roundings of 2^-24 of their sizes
            assert (error <= (c.hidden + 1) * 2**-24 * product.abs().sum(dim=-1)).all()
        assert torch.equal(g["grads_of_dispatch"][0], grad_xs[rank])
        assert torch.equal(g["grads_of_dispatch"][1], grad_weights[rank])


def formula(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The layer on one rank, in the dtype of x: expert e is tanh(scale[e] * x)."""
    terms = torch.tanh(scale[idx.clamp(min=0)] * x.unsqueeze(1)) * weights.unsqueeze(2)
    return torch.where(idx.unsqueeze(2) >= 0, terms, 0.0).sum(dim=1)


def experts(routed: ops.Dispatched, scale: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "batched":
        return torch.tanh(scale.unsqueeze(1) * routed.x)
    if layout == "expert":
        ends = routed.tokens_per_expert.cumsum(0)
        row = torch.arange(len(routed.x))
        expert = torch.searchsorted(ends, row, right=True).clamp(max=len(scale) - 1)
        return torch.tanh(scale[expert] * routed.x)
    assert routed.topk_idx is not None and routed.topk_weights is not None
    return formula(routed.x, routed.topk_idx, routed.topk_weights, scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_gradients_of_a_layer_are_those_of_one_rank(layout: str, ranks: int) -> None:
    c = case(ranks, seed=3)
    scale = torch.rand(c.num_experts, c.hidden, generator=torch.Generator().manual_seed(1)) + 0.5
    seen = [c.drawn(x.shape, 30 + rank) for rank, x in enumerate(c.x)]
    local = c.num_experts // ranks

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank = group.rank
        with c.buffer(group) as buffer:
            x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
            mine = scale[rank * local : (rank + 1) * local].clone().requires_grad_()
            routed = ops.dispatch(buffer, x, c.topk_idx[rank], weights, layout=layout)
            out = ops.combine(experts(routed, mine, layout), routed.handle)
            return (out.detach(), *torch.autograd.grad((out * seen[rank]).sum(), (x, weights, mine)))

    got = all_ranks(ranks, body)
    whole = [torch.cat(t).double().requires_grad_() for t in (c.x, c.topk_weights)]
    scale64 = scale.double().requires_grad_()
    out = formula(whole[0], torch.cat(c.topk_idx), whole[1], scale64)
    wanted = (out, *torch.autograd.grad((out * torch.cat(seen)).sum(), (*whole, scale64)))
    # Sums of at most H, K or all rows' terms, none of them above 8 in size, and less than ten roundings a term.
    terms = (c.topk, c.topk, c.hidden, c.topk * sum(map(len, c.x)))
    for i, (want, count) in enumerate(zip(wanted, terms, strict=True)):
        mine = torch.cat([g[i] for g in got])
        assert mine.shape == want.shape
        assert (mine.double() - want).abs().max() <= 10 * 8 * count * 2**-24, f"result {i}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_numbers_have_exact_gradients(layout: str) -> None:
    """Linear experts and small integers: no rounding anywhere, so every bit must be right."""
    c = case(2, seed=5, exact=True)
    seen = [c.drawn(x.shape, rank).round() for rank, x in enumerate(c.x)]

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank = group.rank
        with c.buffer(group) as buffer:
            x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
            routed = ops.dispatch(buffer, x, c.topk_idx[rank], weights, layout=layout)
            y = routed.x * 3
            if routed.topk_weights is not None:
                y = y * routed.topk_weights.sum(dim=1, keepdim=True)
            out = ops.combine(y, routed.handle)
            return (out.detach(), *torch.autograd.grad((out * seen[rank]).sum(), (x, weights)))

    for rank, got in enumerate(all_ranks(2, body)):
        x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
        out = 3 * x * torch.where(c.topk_idx[rank] >= 0, weights, 0.0).sum(dim=1, keepdim=True)
        for mine, want in zip(got, (out, *torch.autograd.grad((out * seen[rank]).sum(), (x, weights))), strict=True):
            assert torch.equal(mine, want)


@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_sums_may_travel_rounded(layout: str) -> None:
    c = case(3, dtype=torch.bfloat16, seed=2)

    def body(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with c.buffer(group) as buffer:
            rank = group.rank
            routed = ops.dispatch(buffer, c.x[rank], c.topk_idx[rank], c.topk_weights[rank], layout=layout)
            return routed.x, ops.combine(routed.x, routed.handle, wire=torch.bfloat16)

    got, arrived = all_ranks(3, body), arrived_of(c, c.x, layout)
    ys = [(y.flatten(0, 1) if layout == "batched" else y)[: len(a.x)] for (y, _), a in zip(got, arrived, strict=True)]
    want = combine_reference.combine(ys, arrived, layout=layout, wire=torch.bfloat16)
    assert all(torch.equal(out, expected) for (_, out), expected in zip(got, want, strict=True))


def test_a_gradient_of_either_input_alone() -> None:
    """Rounds are the same then, but for what travels: with frozen tokens, or without weights that learn."""
    c = case(2, seed=1)

    def body(group: Any) -> list[torch.Tensor]:
        found = []
        with c.buffer(group) as buffer:
            for wanted in ("both", "x", "weights"):
                x, weights = (t[group.rank].clone() for t in (c.x, c.topk_weights))
                x.requires_grad_(wanted != "weights")
                weights.requires_grad_(wanted != "x")
                routed = ops.dispatch(buffer, x, c.topk_idx[group.rank], weights)
                ops.combine(routed.x * 2, routed.handle).square().sum().backward()
                found += [t.grad for t in (x, weights)]
        return found

    for both_x, both_weights, x, no_weights, no_x, weights in all_ranks(2, body):
        assert no_weights is None and no_x is None
        assert torch.equal(x, both_x) and torch.equal(weights, both_weights)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradcheck(layout: str, ranks: int) -> None:
    """Take whole numbers: differences have no rounding.  Ranks take each step together, since every round needs all of
    them; what returns to one depends on its own tokens alone.
    """
    topk_idx = torch.tensor([[0, 1], [3, -1], [2, 0]])

    def body(group: Any) -> bool:
        g = torch.Generator().manual_seed(0 if group is None else group.rank)
        x = torch.randint(-4, 5, (3, 4), generator=g).float().requires_grad_()
        weights = torch.randint(1, 4, (3, 2), generator=g).float().requires_grad_()
        sizes: dict[str, Any] = {"hidden": 4, "num_experts": 4, "topk": 2, "max_tokens": 3, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, backend="host") as buffer:

            def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                routed = ops.dispatch(buffer, x, topk_idx, weights, layout=layout)
                y = routed.x * 3
                if routed.topk_weights is not None:
                    y = y * routed.topk_weights.sum(dim=1, keepdim=True)
                return ops.combine(y, routed.handle)

            exact: dict[str, Any] = {"eps": 0.5, "atol": 0, "rtol": 0, "nondet_tol": 0}
            return torch.autograd.gradcheck(layer, (x, weights), **exact)

    assert all_ranks(ranks, body) == [True] * ranks


def test_all_rounds_have_the_multiprocessors_of_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    c, given = case(1, seed=1), []
    for name in ("run_dispatch", "run_combine"):
        round_of = getattr(ops.rounds, name)

        def noted(state: Any, request: Any, *tensors: Any, round_of: Any = round_of, **others: Any) -> Any:
            given.append(request.options.num_sms)
            return round_of(state, request, *tensors, **others)

        monkeypatch.setattr(ops.rounds, name, noted)
    with c.buffer(None) as buffer:
        x, weights = c.x[0].clone().requires_grad_(), c.topk_weights[0].clone().requires_grad_()
        routed = ops.dispatch(buffer, x, c.topk_idx[0], weights, num_sms=2)
        again = ops.dispatch_again(2 * x, routed.handle)
        out = ops.combine(routed.x + again, routed.handle)
        torch.autograd.grad(out.sum(), (x, weights))
    assert given == [2] * 6
