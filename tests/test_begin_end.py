"""A dispatch in two halves: what is refused in between, what may run in between, and what comes out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

from .test_buffer import SIZES, call

TENSORS = ("x", "tokens_per_expert", "num_rows", "src", "topk_idx", "topk_weights", "row_weights")


@pytest.fixture
def ranks() -> Iterator[LocalBuffers]:
    with LocalBuffers(3, **SIZES, backend="host", timeout_s=60) as buffers:
        yield buffers


@pytest.fixture
def buffer() -> Iterator[moecomm.Buffer]:
    with moecomm.Buffer(**SIZES, backend="host", timeout_s=60) as alone:
        yield alone


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_two_halves_are_a_whole(ranks: LocalBuffers, layout: str) -> None:
    calls = [{**call(r), "layout": layout} for r in range(3)]
    whole = ranks.dispatch(calls)
    begun = ranks.dispatch_begin(calls)
    ended = ranks.dispatch_end(begun)
    for one, half, other in zip(whole, begun, ended, strict=True):
        assert other is half
        valid = torch.arange(one.x.shape[-2]) < (
            one.tokens_per_expert.unsqueeze(1) if layout == "batched" else one.num_rows
        )
        for name in TENSORS:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.shape == theirs.shape
                rows = name in ("x", "src", "row_weights")
                assert torch.equal(mine[valid] if rows else mine, theirs[valid] if rows else theirs), name
    for a, b in zip(
        ranks.combine([{"y": r.x, "handle": r.handle} for r in whole]),
        ranks.combine([{"y": r.x, "handle": r.handle} for r in ended]),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_without_sync_there_is_room_for_all_rows(ranks: LocalBuffers) -> None:
    begun = ranks.dispatch_begin([{**call(r), "max_rows": 70} for r in range(3)])
    ended = ranks.dispatch_end(begun, sync=False)
    exact = ranks.dispatch([call(r) for r in range(3)])
    for here, want in zip(ended, exact, strict=True):
        rows = int(here.num_rows)
        assert (len(here.x), rows) == (70, len(want.x))
        assert torch.equal(here.x[:rows], want.x)


def test_an_earlier_dispatch_is_combined_in_between(ranks: LocalBuffers) -> None:
    earlier = ranks.dispatch([call(r) for r in range(3)])
    want = ranks.combine([{"y": r.x, "handle": r.handle} for r in earlier])
    begun = ranks.dispatch_begin([call(r + 5) for r in range(3)])
    for _ in range(3):  # more rounds than there are of them to remember
        got = ranks.combine([{"y": r.x, "handle": r.handle} for r in earlier])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ended = ranks.dispatch_end(begun)
    out = ranks.combine([{"y": r.x, "handle": r.handle} for r in ended])
    for rank in range(3):
        given = call(rank + 5)
        torch.testing.assert_close(out[rank], given["x"] * given["topk_weights"].sum(dim=1, keepdim=True))


def test_a_repeat_in_halves_leaves_its_handle_alone(ranks: LocalBuffers) -> None:
    first = ranks.dispatch([call(r) for r in range(3)])
    want = ranks.combine([{"y": r.x, "handle": r.handle} for r in first])
    begun = ranks.dispatch_begin([{"x": call(r)["x"] * 2, "handle": first[r].handle} for r in range(3)])
    got = ranks.combine([{"y": r.x, "handle": r.handle} for r in first])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ended = ranks.dispatch_end(begun)
    for one, two in zip(first, ended, strict=True):
        assert torch.equal(two.x, one.x * 2) and torch.equal(two.src, one.src)


def test_a_hook_ends_it(buffer: moecomm.Buffer) -> None:
    given = call(0)
    routed = buffer.dispatch_begin(**given)
    hook = partial(buffer.dispatch_end, routed)
    assert hook() is routed
    assert torch.equal(routed.x, given["x"][routed.src[:, 1].long()])


def test_nothing_is_read_before_the_end(buffer: moecomm.Buffer) -> None:
    routed = buffer.dispatch_begin(**call(0))
    for name in (*TENSORS, "scales"):
        with pytest.raises(moecomm.BadInput, match="dispatch_end"):
            getattr(routed, name)
    buffer.dispatch_end(routed)
    assert len(routed.x) == 20


def test_what_is_refused_in_between(buffer: moecomm.Buffer) -> None:
    earlier = buffer.dispatch(**call(1))
    routed = buffer.dispatch_begin(**call(0))
    y = torch.zeros(20, 32)
    refused: list[Any] = [
        lambda: buffer.dispatch(**call(0)),
        lambda: buffer.dispatch_begin(**call(0)),
        lambda: buffer.dispatch(call(0)["x"], handle=earlier.handle),
        lambda: buffer.combine(y, routed.handle),
        lambda: buffer.empty(routed.handle),
        lambda: buffer.dispatch_end(earlier),
    ]
    for act in refused:
        with pytest.raises(moecomm.BadInput):
            act()
    buffer.dispatch_end(routed)
    with pytest.raises(moecomm.BadInput, match=r"routed.*dispatch_begin"):
        buffer.dispatch_end(routed)
    want = call(0)["x"] * call(0)["topk_weights"].sum(dim=1, keepdim=True)
    torch.testing.assert_close(buffer.combine(routed.x, routed.handle), want)


def test_memory_that_peers_write_to_is_kept_until_the_end(buffer: moecomm.Buffer) -> None:
    buffer.dispatch_begin(**call(0))  # and dropped
    gc.collect()
    used = buffer.rounds.memory.used
    assert used > 0
    assert buffer.rounds.begun is not None
    buffer.dispatch_end(buffer.rounds.begun)
    gc.collect()
    assert buffer.rounds.memory.used == 0


def test_bad_input_begins_nothing(ranks: LocalBuffers) -> None:
    calls: list[dict[str, Any]] = [call(r) for r in range(3)]
    calls[1]["topk_idx"][3, 1] = 12
    with pytest.raises(moecomm.BadInput) as caught:
        ranks.dispatch_begin(calls)
    assert (caught.value.argument, caught.value.rank) == ("topk_idx", 1)
    for other in ranks.buffers[1:]:
        with pytest.raises(moecomm.BadInput):
            other.check()
    assert all(b.rounds.begun is None for b in ranks.buffers)
    ended = ranks.dispatch_end(ranks.dispatch_begin([call(r) for r in range(3)]))
    assert sum(len(r.x) for r in ended) == 60


def test_nothing_is_read_after_an_end_that_failed(buffer: moecomm.Buffer) -> None:
    routed = buffer.dispatch_begin(**call(0))
    buffer.abort()
    with pytest.raises(moecomm.Aborted):
        buffer.dispatch_end(routed)
    with pytest.raises(moecomm.BadInput, match="routed"):
        routed.x  # noqa: B018
    with pytest.raises(moecomm.Aborted):
        buffer.combine(torch.zeros(20, 32), routed.handle)


def test_closing_in_between(buffer: moecomm.Buffer) -> None:
    routed = buffer.dispatch_begin(**call(0))
    buffer.close()
    with pytest.raises(moecomm.Closed):
        buffer.dispatch_end(routed)
