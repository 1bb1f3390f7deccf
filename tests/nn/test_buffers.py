"""Layers of the same sizes: all ranks agree on the Buffer that they share, and tell them apart in every round."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm.nn import ExpertParallel, shared_buffer
from tests.backends.conftest import run_ranks

RANKS = 3
SIZES: dict[str, Any] = {"hidden": 32, "num_experts": 6, "topk": 2, "max_tokens": 8, "backend": "host"}
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def layer_of(group: Any, **more: Any) -> ExpertParallel:
    return ExpertParallel(group, intermediate=16, device="cpu", **{**SIZES, **more})


def forget_nothing(layer: ExpertParallel) -> ExpertParallel:
    return layer


def in_a_cycle(layer: ExpertParallel) -> None:
    layer.me = [layer]


@pytest.mark.parametrize("keeps", [forget_nothing, in_a_cycle])
@pytest.mark.parametrize("who", [0, 2])
def test_a_layer_that_one_rank_still_has_does_not_matter(who: int, keeps: Callable[[ExpertParallel], Any]) -> None:
    def body(group: Any) -> bool:
        layer = layer_of(group)
        want, kept = layer(X).detach(), None
        if group.rank == who:
            kept = keeps(layer)
        del layer
        layer = layer_of(group)
        assert torch.equal(layer(X), want)
        del kept
        return True

    gc.disable()  # a collector may run on one rank only
    try:
        assert run_ranks(RANKS, body) == [True] * RANKS
    finally:
        gc.enable()
        gc.collect()


def test_layers_share_what_all_ranks_have_open() -> None:
    def body(group: Any) -> list[bool]:
        first, second, other = layer_of(group), layer_of(group), layer_of(group, max_tokens=9)
        for layer in (first, second, other):
            layer(X)
        shared = first.open()
        again = shared_buffer(group, **{**SIZES, "dtype": torch.float32, "device": torch.device("cpu")})
        found = [second.open() is shared, other.open() is not shared, again is shared]
        if group.rank == 1:
            shared.close()
        third = layer_of(group)
        third(X)
        return [*found, third.open() is not shared]

    assert run_ranks(RANKS, body) == [[True] * 4] * RANKS


def test_a_buffer_that_has_failed_is_not_shared() -> None:
    def body(group: Any) -> bool:
        layer = layer_of(group)
        buffer = layer.open()
        with pytest.raises(moecomm.Mismatch):
            buffer.dispatch(X, torch.zeros(5, 2, dtype=torch.int64), layout="flat" if group.rank == 1 else "expert")
        other = layer_of(group)
        other(X)
        return other.open() is not buffer

    assert run_ranks(RANKS, body) == [True] * RANKS


def test_ranks_that_share_other_sizes_are_told() -> None:
    def body(group: Any) -> str:
        layer_of(group).open()
        with pytest.raises(moecomm.Mismatch) as caught:
            layer_of(group, max_tokens=8 + group.rank).open()
        return caught.value.field

    assert run_ranks(2, body) == ["max_tokens"] * 2


def test_a_layer_that_was_not_open_shares_what_has_shrunk() -> None:
    def body(group: Any) -> bool:
        first, second = layer_of(group), layer_of(group)
        first(X)
        buffer = first.open()
        if group.rank == 2:
            buffer.close()
            return True
        with pytest.raises(moecomm.PeerLost):
            first(X)
        buffer.shrink(keep_ids=True)
        return torch.equal(first(X), second(X)) and second.open() is buffer

    assert run_ranks(RANKS, body) == [True] * RANKS


def test_a_layer_that_was_not_open_shares_what_has_masked_ranks() -> None:
    met = threading.Barrier(RANKS)

    def body(group: Any) -> bool:
        first, second = layer_of(group), layer_of(group)
        first(X)
        met.wait(60)
        if group.rank == 2:
            return True
        buffer = first.open()
        buffer.mask([2])
        return torch.equal(first(X), second(X)) and second.open() is buffer

    assert run_ranks(RANKS, body) == [True] * RANKS


def test_a_rank_joins_by_opening_its_layer() -> None:
    groups = moecomm.local_ranks(3)

    def body(group: Any) -> bool:
        if group.rank == 2:
            layer = layer_of(groups[2])
            layer(X)
            return layer.open().num_ranks == 3
        layer = layer_of(group)
        buffer = layer.open()
        buffer.grow(groups[group.rank])
        layer = layer_of(None, buffer=buffer)
        layer(X)
        return buffer.num_ranks == 3

    pair = iter(moecomm.local_ranks(2))
    first = [next(pair), next(pair), groups[2]]
    assert run_ranks(3, lambda group: body(first[group.rank])) == [True] * 3


def swapped(group: Any, layers: list[ExpertParallel], run: Callable[[ExpertParallel], Any]) -> tuple[object, ...]:
    """Run the layers, the last rank in another order; return the fields of the Mismatch."""
    order = layers[::-1] if group.rank == RANKS - 1 else layers
    with pytest.raises(moecomm.Mismatch) as caught:
        run(order[0])
    error = caught.value
    for layer in layers:
        with pytest.raises(moecomm.OutOfStep):
            run(layer)
    return error.field, error.mine, error.theirs, error.rank


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("used", ["new", "open", "given", "copied"])
def test_layers_in_another_order_are_told_apart(used: str, grad: bool) -> None:
    def body(group: Any) -> tuple[object, ...]:
        given = {"buffer": moecomm.Buffer(group, **SIZES, dtype=torch.float32)} if used == "given" else {}
        layers = [layer_of(group, **given, seed=seed) for seed in range(2)]
        if used == "copied":
            layers = [copy.deepcopy(layer) for layer in layers]
        with torch.set_grad_enabled(grad):
            if used == "open":
                for layer in layers:
                    layer(X)
            elif used != "given":
                layers[0].open()  # by all ranks alike: else the first to open is another one
                layers[1].open()
            return swapped(group, layers, lambda layer: layer(X))

    first, second = ("layer", 1, 2, RANKS - 1), ("layer", 2, 1, 0)
    assert run_ranks(RANKS, body) == [first, first, second]


def test_layers_that_open_in_another_order_are_told_apart() -> None:
    def body(group: Any) -> tuple[object, ...]:
        layers = [layer_of(group, seed=seed) for seed in range(2)]
        order = layers[::-1] if group.rank == RANKS - 1 else layers
        with pytest.raises(moecomm.Mismatch) as caught:
            order[0](X)
        return caught.value.field, caught.value.mine, caught.value.theirs

    assert run_ranks(RANKS, body) == [("layer", 1, 2), ("layer", 1, 2), ("layer", 2, 1)]


def test_backward_passes_in_another_order_are_told_apart() -> None:
    def body(group: Any) -> tuple[object, ...]:
        layers = [layer_of(group, seed=seed) for seed in range(2)]
        outs = [layer(X) for layer in layers]
        with pytest.raises(moecomm.Mismatch) as caught:
            outs[group.rank == RANKS - 1].sum().backward()
        return caught.value.field, caught.value.mine, caught.value.theirs

    assert run_ranks(RANKS, body) == [("layer", 1, 2), ("layer", 1, 2), ("layer", 2, 1)]


def test_a_compiled_layer_has_its_number() -> None:
    def body(group: Any) -> tuple[object, ...]:
        layers = [layer_of(group, seed=seed) for seed in range(2)]
        for layer in layers:
            layer.open()
        here = layers[group.rank == 1]
        run = torch.compile(here, backend="aot_eager") if group.rank == 0 else here
        with pytest.raises(moecomm.Mismatch) as caught, torch.no_grad():
            run(X)
        return caught.value.field, caught.value.mine, caught.value.theirs

    assert run_ranks(2, body) == [("layer", 1, 2), ("layer", 2, 1)]


def test_layers_of_a_buffer_are_numbered() -> None:
    buffer = moecomm.Buffer("self", **SIZES, dtype=torch.float32)
    assert [layer_of(None, buffer=buffer)._number for _ in range(3)] == [1, 2, 3]
    other = moecomm.Buffer("self", **SIZES, dtype=torch.float32)
    assert layer_of(None, buffer=other)._number == 1
    for made in (buffer, other):
        made.close()


def test_layers_share_the_graphs_of_a_compiled_one() -> None:
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    layers = [layer_of("self", seed=seed) for seed in range(12)]
    for layer in layers:
        layer.open()
    for layer in layers:
        assert torch.equal(torch.compile(layer, backend=kept, fullgraph=True)(X), layer(X))
    assert len(graphs) == 2, "for the first number, and for any"
    torch.compiler.reset()
