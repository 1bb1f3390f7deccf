"""Flat rows that lie elsewhere are copied into the window where combine is faster so."""

from __future__ import annotations

import pytest
import torch

from moecomm import combine
from moecomm.testing import LocalBuffers, check_case, random_case

SIZES = {"ranks": 2, "hidden": 64, "num_experts": 8, "topk": 2, "max_tokens": 24, "dtype": torch.bfloat16}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> LocalBuffers:
    ranks = LocalBuffers(**SIZES)
    for buffer in ranks.buffers:
        monkeypatch.setattr(buffer.session, "pulls_flat_rows", True)
    return ranks


def call(tokens: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, SIZES["num_experts"], generator=g).argsort(dim=1)[:, : SIZES["topk"]].contiguous()
    return {"x": torch.randn(tokens, 64, generator=g).bfloat16(), "topk_idx": ids}


def test_rows_are_copied_only_where_it_helps(pair: LocalBuffers) -> None:
    with pair:
        routed = pair.dispatch([call(20) | {"layout": "flat"}, call(1) | {"layout": "flat"}])
        used = [buffer.memory.used for buffer in pair.buffers]
        ys = [here.x.clone() for here in routed]
        made = [combine.prepare(b, y, here.handle) for b, y, here in zip(pair.buffers, ys, routed, strict=True)]
        copied = [b.session.context.in_heap(c.args.y) for b, c in zip(pair.buffers, made, strict=True)]
        assert copied == [True, False], "the second has one token, and more rows than four"
        assert len(ys[1]) > 4
        grads = torch.ones(*routed[0].handle.y_shape[:1], SIZES["topk"])
        staged = combine.prepare(pair.buffers[0], ys[0], routed[0].handle, weight_grads=grads)
        assert not pair.buffers[0].session.context.in_heap(staged.args.y), "gradients are staged with their rows"
        there = combine.prepare(pair.buffers[0], routed[0].x, routed[0].handle)
        assert there.args.y == routed[0].x.data_ptr(), "already there"
        del made
        assert [buffer.memory.used for buffer in pair.buffers] == used


def test_rows_that_have_no_room_are_staged(pair: LocalBuffers) -> None:
    with pair:
        routed = pair.dispatch([call(20) | {"layout": "flat"}, call(20) | {"layout": "flat"}])
        buffer, y = pair.buffers[0], routed[0].x.clone()
        kept = []
        while (block := buffer.session.arena.allocate(y.nbytes)) is not None:
            kept.append(block)
        assert combine.prepare(buffer, y, routed[0].handle).args.y == y.data_ptr()


def test_results_stay_exact(pair: LocalBuffers) -> None:
    with pair:
        for seed in range(200):
            check_case(pair, random_case(seed, **SIZES))
