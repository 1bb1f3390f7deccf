"""Operators whose rows have no room: rounds in chunks with the values and gradients of one round, and dropped rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import moecomm
from moecomm import nn, ops
from moecomm.base.choices import Layout
from moecomm.errors import TooManyRows
from moecomm.ops import chunks

from ..backends.conftest import all_ranks

RANKS, HIDDEN, EXPERTS, TOPK, TOKENS = 4, 16, 8, 2, 24
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": TOKENS,
    "dtype": torch.float32,
    "backend": "host",
    "timeout_s": 20,
}
FEW = {"flat": 0.6, "expert": 0.8, "batched": 0.8}
LAYOUTS: tuple[Layout, ...] = ("flat", "expert", "batched")


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make tokens of which most want the experts of rank 1."""
    g = torch.Generator().manual_seed(rank)
    count = TOKENS - 5 * rank
    scores = torch.rand(count, EXPERTS, generator=g)
    scores[:, 2:4] += 0.7
    return torch.randn(count, HIDDEN, generator=g), scores.topk(TOPK).indices, torch.rand(count, TOPK, generator=g)


@contextmanager
def late_errors(buffer: moecomm.Buffer) -> Iterator[None]:
    """Let a call return before its error is raised, as calls on GPUs do: check() or the next call raises it."""
    buffer.rounds.on_cpu = False
    try:
        yield
    finally:
        buffer.rounds.on_cpu = True


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("layout", "alignment", "fewer"),
    [*((layout, 1, fewer) for layout in LAYOUTS for fewer in (1.0, 0.4)), ("expert", 4, 1.0)],
)
def test_chunks_have_the_values_and_gradients_of_one_round(
    layout: Layout, alignment: int, fewer: float, late: bool
) -> None:
    """With a `fewer` below 1, halves of the tokens have no room, either, and are split again."""

    def body(group: Any, factor: float) -> tuple[int, dict[str, torch.Tensor]]:
        x, ids, weights = given(group.rank)
        x.requires_grad_()
        weights.requires_grad_()
        with moecomm.Buffer(group, **SIZES, capacity_factor=factor) as buffer:
            with late_errors(buffer) if late else nullcontext():
                how: dict[str, Any] = {"layout": layout, "expert_alignment": alignment, "overflow": "chunks"}
                sent = ops.dispatch(buffer, x, ids, weights, **how)
            valid = sent.src[..., 0] >= 0
            if layout == "flat":
                valid = torch.arange(len(sent.x)) < sent.num_rows
            if layout == "batched":
                valid = torch.arange(sent.x.shape[1]) < sent.tokens_per_expert[:, None]
            y = torch.sin(sent.x)
            if sent.topk_weights is not None:
                y = y * sent.topk_weights.sum(-1, keepdim=True)
            out = ops.combine(y, sent.handle)
            again = ops.dispatch_again(out, sent.handle)
            back = ops.combine(again.cos(), sent.handle, weighted=False, wire="exact")
            (out * torch.arange(1.0, HIDDEN + 1) + back).sum().backward()
            found = {"x": sent.x[valid], "src": sent.src[valid], "num_rows": sent.num_rows, "again": again[valid]}
            found |= {"tokens_per_expert": sent.tokens_per_expert, "out": out, "back": back}
            assert x.grad is not None and weights.grad is not None
            found |= {"x.grad": x.grad, "weights.grad": weights.grad}
            rounds = len(sent.handle.chunks) if isinstance(sent.handle, ops.ChunkedHandle) else 1
            return rounds, {name: tensor.detach().clone() for name, tensor in found.items()}

    want = all_ranks(RANKS, lambda group: body(group, math.inf))
    got = all_ranks(RANKS, lambda group: body(group, fewer * FEW[layout]))
    for (at_once, first), (rounds, second) in zip(want, got, strict=True):
        assert at_once == 1 and rounds >= (2 if fewer == 1 else 3)
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("late", [False, True])
def test_a_round_without_room_frees_its_memory(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds of the chunks need that memory."""
    x, ids, weights = given(0)
    used, whole = [], chunks.dispatch
    with moecomm.Buffer("self", **SIZES, capacity_factor=0.3) as buffer:
        memory = buffer.rounds.memory

        def dispatch(*about: Any) -> Any:
            used.append(memory.used)
            return whole(*about)

        monkeypatch.setattr(chunks, "dispatch", dispatch)
        with late_errors(buffer) if late else nullcontext():
            sent = ops.dispatch(buffer, x.requires_grad_(), ids, weights, layout="flat", overflow="chunks")
        assert isinstance(sent.handle, ops.ChunkedHandle) and used == [0]
        assert torch.equal(sent.x, x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_layers_in_chunks(grad: bool, alone: bool) -> None:
    """ops.moe and nn.ExpertParallel, with and without gradients."""
    how: dict[str, Any] = {**SIZES, "intermediate": 24, "seed": 1}
    sizes = {name: how.pop(name) for name in ("timeout_s", "backend", "dtype")}

    def body(group: Any, factor: float) -> list[torch.Tensor]:
        x, ids, weights = given(group.rank)
        buffer = moecomm.Buffer(group, **SIZES, capacity_factor=factor)
        layer = nn.ExpertParallel(group, **how, buffer=buffer, dtype=sizes["dtype"])
        x.requires_grad_(grad)
        with buffer, torch.set_grad_enabled(grad):
            w13, w2 = layer.experts.w13, layer.experts.w2
            out = layer(x, ids, weights) if alone else ops.moe(buffer, x, ids, weights, w13, w2)
            if grad:
                out.square().sum().backward()
            grads = [t.grad for t in (x, w13, w2) if t.grad is not None]
            assert len(grads) == 3 * grad
            return [out.detach(), *grads]

    want = all_ranks(RANKS, lambda group: body(group, math.inf))
    got = all_ranks(RANKS, lambda group: body(group, 0.8))
    for first, second in zip(want, got, strict=True):
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overflow", ["error", "drop"])
def test_words_that_do_not_wait(overflow: Any) -> None:
    def body(group: Any) -> int:
        x, ids, weights = given(group.rank)
        with moecomm.Buffer(group, **SIZES, capacity_factor=0.8) as buffer:
            if overflow == "error":
                with pytest.raises(TooManyRows):
                    ops.dispatch(buffer, x, ids, weights, overflow="error")
                return 0
            sent = ops.dispatch(buffer, x, ids, weights, overflow="drop")
            assert sent.dropped is not None
            out = ops.combine(sent.x, sent.handle, wire="exact")
            lost = x * weights.sum(1, keepdim=True) - out
            assert bool((lost.abs().sum(1) > 1e-5).any()) == (int(sent.dropped) > 0)
            return int(sent.dropped)

    assert (sum(all_ranks(RANKS, body)) > 0) == (overflow == "drop")


def test_graphs_drop_and_do_not_wait() -> None:
    x, ids, weights = given(0)
    with moecomm.Buffer("self", **SIZES, capacity_factor=0.5) as buffer:
        name = buffer.name

        def dropping(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            sent = ops.dispatch(name, x, ids, weights, overflow="drop")
            assert sent.dropped is not None
            return ops.combine(sent.x, sent.handle), sent.dropped

        out, dropped = torch.compile(dropping, backend="eager", fullgraph=True)(x)
        assert int(dropped) == TOKENS * TOPK // 2
        assert torch.equal(out, dropping(x)[0])
        waiting = torch.compile(lambda x: ops.dispatch(name, x, ids, weights, overflow="chunks").x, backend="eager")
        with pytest.raises(Exception, match="overflow"):
            waiting(x)
