"""combine(topk_weights=): the source rank's own weights, in the place of those that the dispatch carried."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import host
from moecomm.testing import LocalBuffers

from ..few import few
from ..live import shorten

TOKENS, EXPERTS = 20, 12


def sizes(topk: int, **more: Any) -> dict[str, Any]:
    few = {"hidden": 48, "num_experts": EXPERTS, "topk": topk, "max_tokens": TOKENS, "dtype": torch.float32}
    return {**few, "backend": "host", "timeout_s": 60} | more


def given(rank: int, topk: int, round_: int = 0, most: int = TOKENS) -> dict[str, Any]:
    """Ragged, some ids -1; rank 1 has no tokens.  The weights are those of a round."""
    g = torch.Generator().manual_seed(rank)
    tokens = 0 if rank == 1 else most - rank
    ids = torch.randint(-1, EXPERTS, (tokens, topk), generator=g)
    x = torch.randn(tokens, 48, generator=g)
    g.manual_seed(100 * round_ + rank)
    return {"x": x, "topk_idx": ids, "topk_weights": torch.randn(tokens, topk, generator=g)}


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("layout", few(["expert", "batched"], "expert"))
@pytest.mark.parametrize(("ranks", "topk"), [(1, 2), (2, 3), (3, 8), (4, 13)])
def test_the_bits_of_a_dispatch_that_carried_them(ranks: int, topk: int, layout: str, in_window: bool) -> None:
    """One handle, other weights in every combine, and now and then those of the dispatch."""
    with LocalBuffers(ranks, **sizes(topk, max_tokens=4 * TOKENS)) as buffers:
        compare_with_carried(buffers, topk, layout, in_window, [TOKENS] * ranks)


@pytest.mark.parametrize("direct", ["all", "some", "none"])
@pytest.mark.parametrize("in_window", few([False, True], True))
@pytest.mark.parametrize("layout", few(["expert", "batched"], "expert"))
@pytest.mark.parametrize(("ranks", "domain_ranks", "topk"), [(2, 1, 3), (4, 2, 3), (3, 1, 8), (6, 2, 13)])
def test_the_bits_of_a_dispatch_that_carried_them_over_domains(
    ranks: int,
    domain_ranks: int,
    topk: int,
    layout: str,
    in_window: bool,
    direct: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums go direct to all source ranks, to some, or to none: then through forwarders, several times around their
    rings.
    """
    monkeypatch.setattr(host, "ring_tokens", lambda *_: 32)
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 16 << 10)  # of TOKENS tokens, and of fewer than 150
    many = {"all": (), "some": (0, 3), "none": range(ranks)}[direct]
    with LocalBuffers(ranks, **sizes(topk, max_tokens=300, domain_ranks=domain_ranks)) as buffers:
        shape = buffers.buffers[0].rounds.session.context.shape
        one = max(shape.receive_bytes, shape.staged_row_bytes + 16) + 127  # direct_bytes of domains.h, at most
        assert TOKENS * one <= shape.packet_bytes < 150 * shape.staged_row_bytes and shape.ring_tokens < 150
        compare_with_carried(buffers, topk, layout, in_window, [150 if r in many else TOKENS for r in range(ranks)])


def compare_with_carried(buffers: LocalBuffers, topk: int, layout: str, in_window: bool, most: list[int]) -> None:
    """Combines of one handle against dispatches, each with the weights of a round."""

    def call(rank: int, round_: int = 0) -> dict[str, Any]:
        return given(rank, topk, round_, most[rank]) | {"layout": layout}

    ranks = len(most)
    first = buffers.dispatch([call(rank) for rank in range(ranks)])
    ys = [here.x.sin() for here in first]
    if in_window:  # rank 0 alone: the others stage what they have
        ys[0] = buffers.buffers[0].empty(first[0].handle).copy_(ys[0])
    outs = []
    for round_ in (1, 2, None, 3, 3, None, 4):
        calls = [{"y": y, "handle": here.handle} for y, here in zip(ys, first, strict=True)]
        for rank, one in enumerate(calls):
            if round_ is not None:
                one["topk_weights"] = call(rank, round_)["topk_weights"]
        outs.append((round_ or 0, buffers.combine(calls)))
    for round_, out in outs:
        carried = buffers.dispatch([call(rank, round_) for rank in range(ranks)])
        want = buffers.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, carried, strict=True)])
        for mine, theirs in zip(out, want, strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(outs[0][1][0], outs[1][1][0])


@pytest.mark.parametrize("domain_ranks", [1, 2, 4])
def test_the_sum_that_they_make(domain_ranks: int) -> None:
    """Rank 2 gives others than the dispatch carried; the others give those."""
    with LocalBuffers(4, **sizes(3, domain_ranks=domain_ranks)) as buffers:
        calls = [given(rank, 3) for rank in range(4)]
        routed = buffers.dispatch(calls)
        asked = [
            {"y": here.x, "handle": here.handle, "topk_weights": call["topk_weights"] * (7 if rank == 2 else 1)}
            for rank, (here, call) in enumerate(zip(routed, calls, strict=True))
        ]
        for rank, (out, call) in enumerate(zip(buffers.combine(asked), calls, strict=True)):
            total = torch.where(call["topk_idx"] >= 0, asked[rank]["topk_weights"], 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(out, total * call["x"])


def test_weights_need_not_be_contiguous() -> None:
    with moecomm.Buffer(**sizes(3)) as buffer:
        call = given(0, 3)
        routed = buffer.dispatch(**call)
        want = buffer.combine(routed.x, routed.handle)
        turned = call["topk_weights"].t().contiguous().t()
        assert torch.equal(buffer.combine(routed.x, routed.handle, topk_weights=turned), want)


def test_what_is_refused() -> None:
    with moecomm.Buffer(**sizes(3)) as buffer:
        call = given(0, 3)
        weights = call["topk_weights"]
        routed = buffer.dispatch(**call)
        for wrong in (weights[1:], weights.double(), weights[:, 1:], [1.0]):
            with pytest.raises(moecomm.BadInput, match="topk_weights"):
                buffer.combine(routed.x, routed.handle, topk_weights=wrong)
        with pytest.raises(moecomm.BadInput, match="topk_weights"):
            buffer.combine(routed.x, routed.handle, topk_weights=weights, weighted=False)
        grads = torch.zeros(routed.handle.y_shape[0])
        with pytest.raises(moecomm.Unsupported, match="weight_grads"):
            buffer.combine(routed.x, routed.handle, topk_weights=weights, weight_grads=grads)
        flat = buffer.dispatch(**call, layout="flat")
        with pytest.raises(moecomm.Unsupported, match="flat"):
            buffer.combine(flat.x, flat.handle, topk_weights=weights)
        buffer.combine(routed.x, routed.handle, topk_weights=weights)


def test_many_tokens_are_refused_by_the_most_there_may_be() -> None:
    for most, entries in ((1366, 4098), (1365, 4095)):
        with moecomm.Buffer(**sizes(3, max_tokens=most)) as buffer:
            call = given(0, 3)
            routed = buffer.dispatch(**call)
            if entries <= 4096:
                buffer.combine(routed.x, routed.handle, topk_weights=call["topk_weights"])
                continue
            with pytest.raises(moecomm.Unsupported, match="4098"):
                buffer.combine(routed.x, routed.handle, topk_weights=call["topk_weights"])


@pytest.mark.parametrize(("most", "layout", "why"), [(20, "flat", "flat"), (1366, "expert", "4098")])
def test_the_same_is_refused_over_domains(most: int, layout: str, why: str) -> None:
    """By all ranks, before any of them has begun."""
    with LocalBuffers(2, **sizes(3, max_tokens=most, domain_ranks=1)) as buffers:
        calls = [given(rank, 3) | {"layout": layout} for rank in range(2)]
        routed = buffers.dispatch(calls)
        for buffer, here, call in zip(buffers.buffers, routed, calls, strict=True):
            with pytest.raises(moecomm.Unsupported, match=why):
                buffer.combine(here.x, here.handle, topk_weights=call["topk_weights"])


@pytest.mark.parametrize("domain_ranks", [None, 1])
@pytest.mark.parametrize("who", [0, 2])
def test_ranks_that_differ_are_told(who: int, domain_ranks: int | None) -> None:
    with LocalBuffers(3, **sizes(3, domain_ranks=domain_ranks)) as buffers:
        calls = [given(rank, 3) for rank in range(3)]
        routed = buffers.dispatch(calls)
        mine = [{"y": here.x, "handle": here.handle} for here in routed]
        mine[who]["topk_weights"] = calls[who]["topk_weights"]
        with pytest.raises(moecomm.Mismatch, match="topk_weights given"):
            buffers.combine(mine)
        for buffer in buffers.buffers[1:]:
            with pytest.raises(moecomm.Mismatch, match="topk_weights given"):
                buffer.check()
        for rank in range(3):  # and no place of theirs has changed
            buffers.buffers[rank].rounds.recovered()
            mine[rank]["topk_weights"] = calls[rank]["topk_weights"]
        assert len(buffers.combine(mine)) == 3


@pytest.mark.parametrize("domain_ranks", [None, 1])
def test_a_home_that_never_comes_is_named(domain_ranks: int | None) -> None:
    with LocalBuffers(3, **sizes(3, domain_ranks=domain_ranks)) as buffers:
        calls = [given(rank, 3) for rank in range(3)]
        routed = buffers.dispatch(calls)
        for buffer in buffers.buffers:
            shorten(buffer, 0.5)

        def combine(rank: int) -> moecomm.RoundFailed:
            here, weights = routed[rank], calls[rank]["topk_weights"]
            with pytest.raises(moecomm.RoundFailed) as caught:
                buffers.buffers[rank].combine(here.x, here.handle, topk_weights=weights)
            return caught.value

        with ThreadPoolExecutor(2) as pool:
            for error in pool.map(combine, range(2)):
                assert (type(error), error.peer) == (moecomm.Timeout, 2)
