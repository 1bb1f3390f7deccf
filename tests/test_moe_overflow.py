"""Expert layers whose rows have no room: parts with the values and gradients of one round, drops that count, errors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.errors import BadInput, TooManyRows

from .backends.conftest import run_ranks
from .few import few
from .test_capacity import EXPERTS, RANKS, SIZES, call, dropped_by_hand

MANY, HIDDEN, INNER, TOKENS = 64, 16, 8, 64  # ranks, H, I, tokens of a rank
BOTH = {"num_experts": 2 * MANY, "topk": 2, "max_tokens": TOKENS}
LAYER: dict[str, Any] = {"hidden": HIDDEN, **BOTH, "dtype": torch.float32, "backend": "host", "timeout_s": 80}


class World(NamedTuple):
    """The inputs of all ranks, in float32."""

    x: torch.Tensor  # [R, T, H]
    ids: torch.Tensor  # [R, T, K]
    weights: torch.Tensor  # [R, T, K]
    w13: torch.Tensor  # [E, 2 I, H]
    w2: torch.Tensor  # [E, H, I]

    def of(self, rank: int) -> tuple[torch.Tensor, ...]:
        """Return the arguments of this rank's layer."""
        mine = slice(2 * rank, 2 * rank + 2)
        return self.x[rank], self.ids[rank], self.weights[rank], self.w13[mine], self.w2[mine]


def world(busy: int, times: int) -> World:
    """Make tokens of which rank `busy` gets so many times the rows of even routing: 64 times are all."""
    g = torch.Generator().manual_seed(times)
    others = torch.randint(0, MANY - 1, (MANY, TOKENS, 1), generator=g)
    owner = torch.where(others >= busy, others + 1, others)
    owner.view(-1)[torch.randperm(MANY * TOKENS, generator=g)[: times * TOKENS]] = busy
    ids = 2 * owner + torch.arange(2)
    w13, w2 = torch.randn(2 * MANY, 2 * INNER, HIDDEN, generator=g), torch.randn(2 * MANY, HIDDEN, INNER, generator=g)
    x = torch.randn(MANY, TOKENS, HIDDEN, generator=g)
    return World(x, ids, torch.rand(MANY, TOKENS, 2, generator=g), w13, w2)


def by_hand(given: World) -> tuple[torch.Tensor, World]:
    """Return the outputs `[R, T, H]` and the gradients of their squares, in float64, without communication."""
    x, weights, w13, w2 = (t.double().requires_grad_() for t in (given.x, given.weights, given.w13, given.w2))
    gate, up = torch.einsum("rtkih,rth->rtki", w13[given.ids], x).chunk(2, dim=-1)
    rows = torch.einsum("rtkhi,rtki->rtkh", w2[given.ids], torch.nn.functional.silu(gate) * up)
    out = (rows * weights[..., None]).sum(2)
    of = torch.autograd.grad(out.square().sum(), (x, weights, w13, w2))
    return out.detach(), World(of[0], given.ids, *of[1:])


def run(group: Any, given: World, how: str) -> tuple[bool, list[torch.Tensor]]:
    """Run a layer with room for even routing.  Return whether it took several rounds, its output and its gradients."""
    x, ids, weights, w13, w2 = given.of(group.rank)
    with moecomm.Buffer(group, **LAYER, capacity_factor=1.5) as buffer:
        free = buffer.rounds.memory.arena.largest_free
        if how == "moe":
            out = buffer.moe(x, ids, weights, w13, w2)
            made = buffer.rounds.turn.made
            assert buffer.rounds.memory.arena.largest_free == free
            return made > 2, [out]
        leaves = [t.clone().requires_grad_() for t in (x, weights, w13, w2)]
        if how == "ops.moe":
            out = ops.moe(buffer, leaves[0], ids, *leaves[1:])
        else:
            layer = moecomm.nn.ExpertParallel(
                group, **{"hidden": HIDDEN, "intermediate": INNER, **BOTH}, gate=None, buffer=buffer, device="cpu"
            )
            layer.load_state_dict({"experts.w13": w13, "experts.w2": w2})
            out = layer(leaves[0], ids, leaves[1])
            leaves[2:] = [layer.experts.w13, layer.experts.w2]
        made = buffer.rounds.turn.made
        out.square().sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)
        return made > 2, [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(given: World, how: str) -> set[bool]:
    """Compare a layer of 64 ranks with by_hand(); return whether its ranks took several rounds."""
    found = run_ranks(MANY, lambda group: run(group, given, how))
    out, grads = by_hand(given)
    for rank, of_rank in enumerate(found):
        assert isinstance(of_rank, tuple), of_rank
        x, _, weights, w13, w2 = grads.of(rank)
        for got, want in zip(of_rank[1], (out[rank], x, weights, w13, w2), strict=False):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    return {parts for parts, _ in found}


@pytest.mark.timeout(200)
@pytest.mark.long
@pytest.mark.parametrize("how", ["moe", "ops.moe", "nn"])
def test_all_tokens_of_64_ranks_to_one(how: str) -> None:
    assert check(world(23, MANY), how) == {True}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", few(["moe", "ops.moe", "nn"], "moe"))
@pytest.mark.parametrize("times", few([1, 2, 4, 8, 16, 32, 64], 1, 4))
def test_skew_of_64_ranks(times: int, how: str) -> None:
    """With room for 1.5 times even routing, skew of 1 may take one round, and any other takes more."""
    parts = check(world(0, times), how)
    assert len(parts) == 1 and (times == 1 or parts == {True})


def experts(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    shapes = {"w13": (EXPERTS // RANKS, 64, SIZES["hidden"]), "w2": (EXPERTS // RANKS, SIZES["hidden"], 32)}
    return {name: torch.randn(shape, generator=g).mul(0.1).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("overflow", [None, "chunks"])
@pytest.mark.parametrize("skew", [0, 9])
def test_a_layer_in_parts(skew: float, overflow: Any) -> None:
    def body(group: Any, factor: float) -> torch.Tensor:
        given = {**call(group.rank, skew), **experts(group.rank, torch.bfloat16)}
        with moecomm.Buffer(group, **SIZES, capacity_factor=factor) as buffer:
            out = torch.empty_like(given["x"])
            assert buffer.moe(**given, bias=given["x"], out=out, overflow=overflow) is out
            return out

    want = run_ranks(RANKS, lambda group: body(group, math.inf))
    got = run_ranks(RANKS, lambda group: body(group, 0.8))
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("how", [{"overflow": "error"}, {"max_rows": 64}, {"max_rows": 64, "overflow": "error"}])
def test_errors_on_every_rank_and_the_next_layer_is_right(how: dict[str, Any]) -> None:
    def body(group: Any) -> TooManyRows:
        given = {**call(group.rank, 9), **experts(group.rank, torch.bfloat16)}
        with moecomm.Buffer(group, **SIZES, capacity_factor=0.8) as buffer:
            with pytest.raises(TooManyRows) as caught:
                buffer.moe(**given, **how)
            buffer.check()
            with moecomm.Buffer(group, **SIZES, capacity_factor=math.inf) as large:
                torch.testing.assert_close(buffer.moe(**given), large.moe(**given))
            return caught.value

    for error in run_ranks(RANKS, body):
        assert (error.argument, error.rank, error.room) == ("max_rows", 0, 64 if "max_rows" in how else 96)


@pytest.mark.parametrize("max_rows", [None, 32])
def test_drop_keeps_the_largest_weights_and_counts(max_rows: int | None) -> None:
    """Values and gradients are those of a layer whose caller has dropped the same entries."""
    sizes = {**SIZES, "dtype": torch.float32}

    def body(group: Any) -> int:
        given = {**call(group.rank, 2), **experts(group.rank, torch.float32)}
        given["x"] = given["x"].float()
        with moecomm.Buffer(group, **sizes, capacity_factor=0.8) as buffer:
            room = buffer.rounds.settings.capacity_rows("expert") if max_rows is None else max_rows
            ids, weights = given["topk_idx"], given["topk_weights"]
            kept = torch.tensor(dropped_by_hand(buffer.rounds.settings, "expert", room, ids, weights)).view_as(ids)
            count, again = torch.full((2, 1), -7, dtype=torch.int32)
            how: dict[str, Any] = {"max_rows": max_rows, "overflow": "drop"}
            out = buffer.moe(**given, **how, dropped=count)
            assert int(count) == int((kept < 0).sum())
            want = buffer.moe(**{**given, "topk_idx": kept}, max_rows=max_rows, overflow="error")
            assert torch.equal(out, want)
            leaves = {name: given[name].clone().requires_grad_() for name in ("x", "topk_weights", "w13", "w2")}
            ops.moe(buffer, topk_idx=ids, **leaves, **how, dropped=again).square().sum().backward()
            assert torch.equal(again, count)
            others = {name: given[name].clone().requires_grad_() for name in leaves}
            ops.moe(buffer, topk_idx=kept, **others, max_rows=max_rows).square().sum().backward()
            for name, leaf in leaves.items():
                assert leaf.grad is not None and others[name].grad is not None
                assert torch.equal(leaf.grad, others[name].grad), name
            assert bool((leaves["topk_weights"].grad[kept < 0] == 0).all())
            return int(count)

    found = run_ranks(RANKS, body)
    assert all(isinstance(count, int) for count in found), found
    assert sum(found) > 0


def test_a_module_counts_what_it_drops() -> None:
    """Without gradients through Buffer.moe, with them through operators, and in a graph of torch.compile."""
    sizes = {"hidden": HIDDEN, "num_experts": 4, "topk": 2, "max_tokens": TOKENS}
    with moecomm.Buffer("self", **sizes, dtype=torch.float32, device="cpu", capacity_factor=0.5) as buffer:
        layer = moecomm.nn.ExpertParallel(
            "self", **sizes, intermediate=INNER, buffer=buffer, overflow="drop", device="cpu"
        )
        assert "dropped" not in layer.state_dict() and layer.dropped is not None
        x, counts, outs = torch.randn(TOKENS, HIDDEN), [], []
        for run_ in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    layer.dropped.zero_()
                    outs.append(run_(x).detach())
                    counts.append(int(layer.dropped))
        assert counts == 4 * [TOKENS]  # half of two entries for each token
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0])
    assert moecomm.nn.ExpertParallel("self", **sizes, intermediate=INNER, device="cpu").dropped is None


def test_what_does_not_fit_together() -> None:
    count, read_only = torch.zeros(1, dtype=torch.int32), numpy.zeros(1, dtype=numpy.int32)
    read_only.flags.writeable = False
    with moecomm.Buffer("self", **SIZES) as buffer:
        given = {
            **call(0, 0),
            "w13": torch.zeros(EXPERTS, 16, 64).bfloat16(),
            "w2": torch.zeros(EXPERTS, 64, 8).bfloat16(),
        }
        for argument, how in (
            ("overflow", {"overflow": "chunks", "max_rows": 100}),
            ("overflow", {"overflow": "spill"}),
            ("dropped", {"overflow": "drop"}),
            ("dropped", {"dropped": count}),
            ("dropped", {"overflow": "drop", "dropped": torch.zeros(1)}),
            ("dropped", {"overflow": "drop", "dropped": torch.zeros(2, dtype=torch.int32)}),
            ("dropped", {"overflow": "drop", "dropped": read_only}),
        ):
            for layer in (buffer.moe, lambda **named: ops.moe(buffer, **named)):
                with pytest.raises(BadInput) as caught:
                    layer(**given, **how)
                assert caught.value.argument == argument


def test_outputs_and_biases_of_parts_are_checked_as_those_of_one_round() -> None:
    g = torch.Generator().manual_seed(0)
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": 4, "topk": 2, "max_tokens": 6, "backend": "host"}
    both = torch.randn(7, HIDDEN, generator=g).bfloat16()
    x, ids, weights = both[:6], torch.tensor([[0, 1]] * 6), torch.rand(6, 2, generator=g)
    w13 = torch.randn(4, 2 * INNER, HIDDEN, generator=g).bfloat16()
    given = (x, ids, weights, w13, torch.randn(4, HIDDEN, INNER, generator=g).bfloat16())
    wrong = [
        ("out", torch.empty(7, HIDDEN).bfloat16()),
        ("out", torch.empty(6, HIDDEN)),
        ("out", torch.empty_like(x).requires_grad_()),
        ("out", x[0].expand(6, -1)),
        ("bias", torch.ones(7, HIDDEN).bfloat16()),
        ("bias", torch.ones(5, HIDDEN).bfloat16()),
    ]
    texts: list[list[str]] = []
    outs = []
    for factor in (None, 0.3):
        with moecomm.Buffer("self", **sizes, capacity_factor=factor) as buffer:
            outs.append(buffer.moe(*given))
            made, found = buffer.rounds.turn.made, []
            assert (made > 2) == (factor is not None)
            for argument, value in wrong:
                with pytest.raises(BadInput) as caught:
                    buffer.moe(*given, **{argument: value})
                found.append(str(caught.value))
            texts.append(found)
            assert buffer.rounds.turn.made == made + len(wrong), "no further round"
    assert texts[0] == texts[1] and torch.equal(*outs)
    with moecomm.Buffer("self", **sizes, capacity_factor=0.3) as buffer:
        over_x = buffer.moe(*given, out=both[1:])  # where later parts read
    assert torch.equal(over_x, outs[0])
