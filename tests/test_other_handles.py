"""Ranks that combine or repeat handles of different dispatches, in calls that are otherwise alike, are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.base.protocol import LAYOUTS
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_dispatch

from .conftest import Ranks

SIZES: dict[str, Any] = {"hidden": 32, "num_experts": 6, "topk": 2, "max_tokens": 12, "dtype": torch.float32}


def call(rank: int, seed: int = 0, **given: Any) -> dict[str, Any]:
    """One layer's tokens: as many, and as many rows in all, whatever the seed."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    idx = torch.rand(4 + 3 * rank, 6, generator=g).argsort(dim=1)[:, :2]
    x, weights = torch.randn(len(idx), 32, generator=g), torch.rand(len(idx), 2, generator=g)
    return {"x": x, "topk_idx": idx, "topk_weights": weights, **given}


def all_ranks_raise(buffers: LocalBuffers, calls: list[dict[str, Any]], other: int, rounds: tuple[int, int]) -> None:
    """`rounds`: those of the dispatches whose handles the others and `other` have."""
    run = buffers.combine if "y" in calls[0] else buffers.dispatch
    with pytest.raises(moecomm.Mismatch) as raised:
        run(calls)
    errors = [raised.value]
    for buffer in buffers.buffers[1:]:
        with pytest.raises(moecomm.Mismatch) as raised:
            buffer.check()
        errors.append(raised.value)
    for buffer in buffers.buffers:
        with pytest.raises(moecomm.OutOfStep, match="handle: this rank has"):
            buffer.check()
        buffer.rounds.recovered()  # as if the ranks had agreed where they are
    most, one = (f"that of the dispatch of round {n}" for n in rounds)
    for rank, error in enumerate(errors):
        mine, theirs, peer = (one, most, int(other == 0)) if rank == other else (most, one, other)
        assert (error.field, error.mine, error.theirs, error.rank) == ("handle", mine, theirs, peer)


@pytest.mark.parametrize("domain_ranks", [None, 1])
@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_are_told_and_their_rows_stay(layout: str, other: int, domain_ranks: int | None) -> None:
    with LocalBuffers(3, **SIZES, backend="host", domain_ranks=domain_ranks) as buffers:
        calls = [call(rank, layout=layout, expert_alignment=1) for rank in range(3)]
        first, second = (buffers.dispatch([call(r, seed, layout=layout) for r in range(3)]) for seed in (1, 2))
        want = buffers.combine([{"y": here.x, "handle": here.handle} for here in second])
        mixed = [first[r].handle if r == other else second[r].handle for r in range(3)]
        ys = [torch.ones(handle.y_shape, dtype=torch.float32) for handle in mixed]
        all_ranks_raise(buffers, [{"y": y, "handle": h} for y, h in zip(ys, mixed, strict=True)], other, (2, 1))
        again = [{"x": c["x"], "handle": h} for c, h in zip(calls, mixed, strict=True)]
        all_ranks_raise(buffers, again, other, (2, 1))
        # With rows in the window, which peers would read there.
        ys = [buffer.empty(h) for buffer, h in zip(buffers.buffers, mixed, strict=True)]
        all_ranks_raise(buffers, [{"y": y, "handle": h} for y, h in zip(ys, mixed, strict=True)], other, (2, 1))
        out = buffers.combine([{"y": here.x, "handle": here.handle} for here in second])
        assert all(torch.equal(mine, right) for mine, right in zip(out, want, strict=True))


def test_handles_of_a_repeat_and_of_both_halves_are_those_of_their_dispatch() -> None:
    with LocalBuffers(2, **SIZES, backend="host") as buffers:
        calls = [call(rank, layout="flat") for rank in range(2)]
        routed = buffers.dispatch(calls)
        again = buffers.dispatch([{"x": c["x"], "handle": r.handle} for c, r in zip(calls, routed, strict=True)])
        out = buffers.combine(
            [{"y": routed[0].x, "handle": routed[0].handle}, {"y": again[1].x, "handle": again[1].handle}]
        )
        begun = buffers.dispatch_begin(calls)
        ended = buffers.dispatch_end(begun)
        halves = buffers.combine(
            [{"y": begun[0].x, "handle": begun[0].handle}, {"y": ended[1].x, "handle": ended[1].handle}]
        )
        assert all(torch.equal(mine, right) for mine, right in zip(halves, out, strict=True))
        mixed = [{"y": begun[0].x, "handle": begun[0].handle}, {"y": again[1].x, "handle": again[1].handle}]
        all_ranks_raise(buffers, mixed, 1, (4, 1))


def test_a_void_dispatch_is_another_one() -> None:
    with LocalBuffers(2, **SIZES, backend="host") as buffers:
        calls = [call(rank, layout="flat", sync=False) for rank in range(2)]
        good = buffers.dispatch(calls)
        void = [prepare_dispatch(b, **c, max_rows=1) for b, c in zip(buffers.buffers, calls, strict=True)]
        _native.host_run_all([here.args for here in void])  # without its end, which raises
        for buffer in buffers.buffers:
            with pytest.raises(moecomm.BadInput, match="max_rows"):
                buffer.check()
        handles = [good[0].handle, void[1].handle]
        ys = [torch.ones(handle.y_shape, dtype=torch.float32) for handle in handles]
        all_ranks_raise(buffers, [{"y": y, "handle": h} for y, h in zip(ys, handles, strict=True)], 1, (1, 2))
        ys = [torch.ones(here.handle.y_shape, dtype=torch.float32) for here in void]
        outs = buffers.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, void, strict=True)])
        assert not any(bool(out.any()) for out in outs), "who does not know yet combines nothing"


def _with_the_handle_before(rank: int, group: Any) -> tuple[str, int]:
    with moecomm.Buffer(group, **SIZES, backend="host") as buffer:
        first, second = (buffer.dispatch(**call(rank, seed, layout="expert")) for seed in (1, 2))
        ys = [torch.zeros(here.handle.y_shape) for here in (first, second)]
        with pytest.raises(moecomm.Mismatch, match="that of the dispatch of round 2") as raised:
            buffer.combine(*((ys[0], first.handle) if rank == 1 else (ys[1], second.handle)))
        with pytest.raises(moecomm.OutOfStep):
            buffer.combine(ys[1], second.handle)
        return raised.value.field, raised.value.rank


def test_processes_are_told(ranks: Ranks) -> None:
    assert ranks.run(3, _with_the_handle_before) == [("handle", 1), ("handle", 0), ("handle", 1)]
