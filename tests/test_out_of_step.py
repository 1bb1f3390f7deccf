"""Ranks that are no longer at the same call are told so, in every later call: no result is that of another call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.errors import Mismatch, OutOfStep, TooManyRows

from .backends.conftest import run_ranks

RANKS, HIDDEN, EXPERTS, TOPK, TOKENS, INNER = 3, 32, 6, 2, 24, 8
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
CHUNKS: dict[str, Any] = {**SIZES, "capacity_factor": 0.2}  # no dispatch of all tokens has room


def opened(group: Any, dtype: torch.dtype = torch.float32, **more: Any) -> moecomm.Buffer:
    return moecomm.Buffer(group, **{**SIZES, **more}, dtype=dtype, backend="host", timeout_s=10)


def inputs(layer: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(RANKS * layer + rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return torch.randn(TOKENS, HIDDEN, generator=g), ids, torch.rand(TOKENS, TOPK, generator=g)


def run_layer(buffer: moecomm.Buffer, layer: int, raises: bool = False) -> bool:
    """Run a layer that multiplies by its number; return whether the result is right."""
    x, ids, weights = inputs(layer, buffer.rank)
    routed = buffer.dispatch(x, ids, weights)
    if raises:
        raise ZeroDivisionError
    out = buffer.combine(routed.x * (layer + 1), routed.handle)
    return torch.allclose(out, (layer + 1) * x * weights.sum(1, keepdim=True), atol=1e-4)


def outcomes(buffer: moecomm.Buffer, calls: list[Callable[[], bool]]) -> list[str]:
    """Make every call; return the names of what they raise, "right" or "wrong"."""
    found = []
    for call in calls:
        try:
            found.append("right" if call() else "wrong")
        except (moecomm.MoecommError, ZeroDivisionError, MemoryError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("at", [0, 2])
def test_after_an_error_between_dispatch_and_combine_no_layer_is_paired_with_another(at: int) -> None:
    def body(group: Any) -> list[str]:
        with opened(group) as buffer:
            raises = [group.rank == 1 and layer == at for layer in range(6)]
            return outcomes(buffer, [lambda n=n: run_layer(buffer, n, raises[n]) for n in range(6)])

    right, others = ["right"] * at, ["OutOfStep"] * 5
    for rank, found in enumerate(run_ranks(RANKS, body)):
        first = ["ZeroDivisionError", "Mismatch"] if rank == 1 else ["Mismatch", "OutOfStep"]
        assert found == [*right, *first, *others][:6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("face", ["Buffer", "exact", "ops"])
def test_a_layer_against_its_two_rounds(dtype: torch.dtype, face: str) -> None:
    """They are the same rounds, unless the wire differs."""

    def body(group: Any) -> tuple[str, object, object]:
        x, ids, weights = inputs(0, group.rank)
        x = x.to(dtype)
        w13 = torch.randn(EXPERTS // RANKS, 2 * INNER, HIDDEN, dtype=dtype)
        w2 = torch.randn(EXPERTS // RANKS, HIDDEN, INNER, dtype=dtype)
        with opened(group, dtype) as buffer:

            def call() -> None:
                if face == "ops" and group.rank == 1:
                    made = ops.dispatch(buffer, x, ids, weights)
                    ops.combine(made.x, made.handle)
                elif face == "ops":
                    ops.moe(buffer, x, ids, weights, w13, w2)
                elif group.rank == 1:
                    routed = buffer.dispatch(x, ids, weights)
                    buffer.combine(routed.x, routed.handle, wire="exact" if face == "exact" else None)
                else:
                    buffer.moe(x, ids, weights, w13, w2)

            with pytest.raises(Mismatch) as caught:
                call()
            with pytest.raises(OutOfStep):
                buffer.dispatch(x, ids, weights)
            return caught.value.field, caught.value.mine, caught.value.theirs

    moe, apart = ("call", "moe", "dispatch"), ("call", "dispatch", "moe")
    assert run_ranks(RANKS, body) == [moe, apart, moe]


def test_a_forward_pass_against_a_backward_pass() -> None:
    def body(group: Any) -> str:
        x, ids, weights = inputs(0, group.rank)
        with opened(group) as buffer:
            made = ops.dispatch(buffer, x.requires_grad_(), ids, weights)
            out = ops.combine(made.x, made.handle).sum()
            forward = group.rank == 0
            with pytest.raises(Mismatch) as caught:
                ops.dispatch_again(x.detach(), made.handle) if forward else out.backward()
            return caught.value.field

    assert run_ranks(RANKS, body) == ["call"] * RANKS


def test_ranks_that_treat_too_many_rows_differently() -> None:
    def body(group: Any) -> list[str]:
        with opened(group, capacity_factor=0.2) as buffer:
            x, ids, weights = inputs(0, group.rank)

            def call() -> bool:
                buffer.dispatch(x, ids, weights, overflow="error" if group.rank == 0 else "chunks")
                return False

            return outcomes(buffer, [call] * 4)

    first, *others = run_ranks(RANKS, body)
    assert first == ["TooManyRows", "Mismatch", "OutOfStep", "OutOfStep"]
    assert others == [["Mismatch", "OutOfStep", "OutOfStep", "OutOfStep"]] * 2


def in_chunks(name: str, buffer: moecomm.Buffer, layer: int) -> None:
    """Make a call that takes several rounds."""
    x, ids, weights = inputs(layer, buffer.rank)
    w13, w2 = torch.ones(EXPERTS // RANKS, 2 * INNER, HIDDEN), torch.ones(EXPERTS // RANKS, HIDDEN, INNER)
    if name == "moe":
        buffer.moe(x, ids, weights, w13, w2)
    elif name == "ops":
        made = ops.dispatch(buffer, x.requires_grad_(), ids, weights)
        assert isinstance(made.handle, ops.ChunkedHandle)
        ops.combine(made.x, made.handle).sum().backward()
    elif name == "ops.moe":
        ops.moe(buffer, x, ids, weights, w13.requires_grad_(), w2).sum().backward()
    else:
        routed = buffer.dispatch(x, ids, weights)
        buffer.combine(buffer.dispatch(x, handle=routed.handle).x, routed.handle)


def fail_at(buffer: moecomm.Buffer, fail: int) -> Counter[str]:
    """Let the allocation of this number, and no later one, run out of memory.  Return the counter of allocations."""
    counts: Counter[str] = Counter()
    memory = buffer.rounds.memory
    allocate = memory.allocate

    def counted(*sizes: int) -> Any:
        counts["made"] += 1
        if counts["made"] == fail:
            raise MemoryError
        return allocate(*sizes)

    memory.allocate = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("name", ["Buffer", "moe", "ops", "ops.moe"])
def test_no_memory_in_any_round_of_a_call_in_chunks(name: str) -> None:
    def allocations(group: Any) -> int:
        with opened(group, **CHUNKS) as buffer:
            counts = fail_at(buffer, 0)
            in_chunks(name, buffer, 0)
            return counts["made"]

    made = run_ranks(RANKS, allocations)[1]
    assert made > 4
    for fail in range(1, made + 1):

        def body(group: Any, fail: int = fail) -> list[str]:
            with opened(group, **CHUNKS) as buffer:
                if group.rank == 1:
                    fail_at(buffer, fail)

                def call(layer: int) -> bool:
                    in_chunks(name, buffer, layer)
                    return True

                return outcomes(buffer, [lambda n=n: call(n) for n in range(3)])

        here = run_ranks(RANKS, body)
        assert here[1] == ["MemoryError", "OutOfStep", "OutOfStep"], fail
        for found in (here[0], here[2]):
            assert found in (["OutOfStep"] * 3, ["right", "OutOfStep", "OutOfStep"]), fail


def test_an_error_of_all_ranks_counts_on_none() -> None:
    """Also if a round has left it behind in the midst of a call."""

    def body(group: Any) -> list[str]:
        with opened(group) as buffer:
            x, ids, weights = inputs(0, group.rank)

            def bad(layer: int) -> bool:
                found = ids.clone()
                found[0, 0] = EXPERTS if group.rank == layer else 0
                buffer.dispatch(x, found, weights)
                return False

            def full() -> bool:
                buffer.dispatch(x, ids, weights, max_rows=1)
                return False

            calls = [lambda: bad(0), lambda: run_layer(buffer, 1), lambda: bad(1), full, lambda: run_layer(buffer, 2)]
            return outcomes(buffer, calls)

    assert run_ranks(RANKS, body) == [["BadInput", "right", "BadInput", TooManyRows.__name__, "right"]] * RANKS


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_numbered_layers_of_operators_in_another_order(whole: bool, backward: bool) -> None:
    """Their weights are of the same sizes."""

    def body(group: Any) -> tuple[object, ...]:
        x, ids, weights = inputs(0, group.rank)
        w13 = torch.ones(EXPERTS // RANKS, 2 * INNER, HIDDEN, requires_grad=True)
        w2 = torch.ones(EXPERTS // RANKS, HIDDEN, INNER)
        with opened(group) as buffer:

            def run(layer: int) -> torch.Tensor:
                if whole:
                    return ops.moe(buffer, x, ids, weights, w13, w2, layer=layer)
                made = ops.dispatch(buffer, x.requires_grad_(), ids, weights, layer=layer)
                return ops.combine(made.x, made.handle)

            first, second = (2, 1) if group.rank == 1 else (1, 2)
            calls = {1: run(1).sum().backward, 2: run(2).sum().backward} if backward else {}
            with pytest.raises(Mismatch) as caught:
                calls[first]() if backward else run(first)
            with pytest.raises(OutOfStep):
                run(second)
            return caught.value.field, caught.value.mine, caught.value.theirs

    here, there = ("layer", 1, 2), ("layer", 2, 1)
    assert run_ranks(RANKS, body) == [here, there, here]


@pytest.mark.parametrize("layer", [-1, 1 << 16, 1.5, "1", None, True])
def test_no_number_of_a_layer(layer: Any) -> None:
    x, ids, weights = inputs(0, 0)
    w13, w2 = torch.ones(EXPERTS, 2 * INNER, HIDDEN), torch.ones(EXPERTS, HIDDEN, INNER)
    with opened("self") as buffer:
        for call in (
            lambda: ops.dispatch(buffer, x, ids, weights, layer=layer),
            lambda: ops.moe(buffer, x, ids, weights, w13, w2, layer=layer),
        ):
            with pytest.raises(moecomm.BadInput) as caught:
                call()
            assert caught.value.argument == "layer"
