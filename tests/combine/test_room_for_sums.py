"""On GPUs rows that are reduced have a place each in the window: where combine makes room for them, and where not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecomm import Routed
from moecomm.base import packets
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine

TOKENS, HIDDEN, TOPK = 20, 64, 2
SIZES: dict[str, Any] = {"ranks": 2, "hidden": HIDDEN, "num_experts": 8, "topk": TOPK, "max_tokens": 24}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBuffers]:
    """Ranks prepared as on GPUs, where so many tokens do not come in packets."""
    monkeypatch.setattr(packets, "fit_return_packets", lambda bytes_of_row, tokens, topk, room, **_: tokens < TOKENS)
    with LocalBuffers(**SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", True)
        yield ranks


def call(tokens: int, layout: str, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, SIZES["num_experts"], generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return {"x": torch.randn(tokens, HIDDEN, generator=g).bfloat16(), "topk_idx": ids, "layout": layout, **more}


def arrived(pair: LocalBuffers, layout: str, **more: Any) -> Routed:
    return pair.dispatch([call(TOKENS, layout, **more), call(TOKENS, layout, **more)])[0]


@pytest.mark.parametrize(
    ("layout", "more", "options", "row"),
    [
        ("flat", {}, {}, 2 * HIDDEN),
        ("expert", {}, {"wire": "exact"}, 4 * HIDDEN),
        ("expert", {}, {}, 2 * HIDDEN),
        ("batched", {"max_rows": 16}, {"wire": "exact"}, 4 * HIDDEN),
    ],
)
@pytest.mark.parametrize("grads", [False, True])
def test_a_place_for_each_flat_row(
    pair: LocalBuffers, layout: str, more: dict[str, Any], options: dict[str, Any], row: int, grads: bool
) -> None:
    here, buffer = arrived(pair, layout, **more), pair.buffers[0]
    used, y = buffer.rounds.memory.used, here.x.clone()
    if grads:
        options = options | {"weight_grads": torch.ones(*y.shape[:-1], *((TOPK,) if layout == "flat" else ()))}
    for _ in range(2):  # the first makes a plan, the other finds it
        made = prepare_combine(buffer, y, here.handle, **options)
        assert made.args.y == y.data_ptr() and buffer.rounds.session.context.in_heap(made.args.reduced_rows)
        rows = min(y.shape[:-1].numel(), SIZES["ranks"] * SIZES["max_tokens"])
        assert buffer.rounds.memory.used - used >= rows * (row + 16 * grads)
        del made
        assert buffer.rounds.memory.used == used, "it is kept for the round alone"


def test_none_where_rows_are_read_or_sent_as_they_are(pair: LocalBuffers) -> None:
    here, buffer = arrived(pair, "flat"), pair.buffers[0]
    assert prepare_combine(buffer, here.x, here.handle).args.reduced_rows == 0, "y is in the window"
    grads = torch.ones(len(here.x), TOPK)
    assert prepare_combine(buffer, here.x, here.handle, weight_grads=grads).args.reduced_rows != 0, (
        "gradients travel beside"
    )
    few = pair.dispatch([call(TOKENS - 1, "flat"), call(TOKENS - 1, "flat")])[0]
    assert prepare_combine(buffer, few.x.clone(), few.handle).args.reduced_rows == 0, "our tokens come in packets"


def test_none_where_rows_go_through_the_ring(pair: LocalBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    here, buffer = arrived(pair, "expert"), pair.buffers[0]
    given = prepare_combine(buffer, here.x, here.handle, topk_weights=torch.rand(TOKENS, TOPK))
    assert given.args.reduced_rows == 0, "source ranks give the weights"
    monkeypatch.setattr(buffer.rounds.memory, "_extend_window", lambda nbytes: None)
    kept = []
    while (block := buffer.rounds.memory.arena.allocate(here.x.nbytes)) is not None:
        kept.append(block)
    assert prepare_combine(buffer, here.x, here.handle).args.reduced_rows == 0, "no room"
