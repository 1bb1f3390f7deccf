"""Masks that one rank alone changes, against a plain model of what ranks agree on in their next dispatch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer

from ..few import few

RANKS, LOCAL, HIDDEN, TOKENS, TOPK = 4, 2, 128, 6, 3
IDLE_S = 60


def masked_in(buffer: Buffer) -> set[int]:
    """Return the ranks that are masked in a rank's view."""
    status = torch.zeros(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return {rank for rank in range(RANKS) if status[rank]}


def step(buffer: Buffer, seed: int = 0) -> set[int]:
    """Make a dispatch and a combine, whose sums must be exact; return the masks."""
    g = torch.Generator().manual_seed(seed * RANKS + buffer.rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=g).bfloat16()
    ids = torch.rand(TOKENS, RANKS * LOCAL, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, RANKS * LOCAL, use_fp8=False)
    masked = masked_in(buffer)
    out, *_ = buffer.low_latency_combine(rows, ids, torch.ones(ids.shape), handle)
    there = ~torch.isin(ids // LOCAL, torch.tensor(sorted(masked), dtype=torch.int64))
    assert torch.equal(out, (x.float() * there.sum(dim=1, keepdim=True)).bfloat16())
    return masked


def on_ranks(body: Callable[[Buffer], Any], ranks: int = RANKS, timeout_s: float = 30.0) -> list[Any]:
    """Run `body` on each rank, as a thread, over a Buffer that masks."""

    def run(group: Any) -> Any:
        buffer = Buffer(group, enable_shrink=True)
        buffer._pool._round_s = timeout_s
        try:
            return body(buffer)
        finally:
            buffer.destroy()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, moecomm.local_ranks(ranks)))


class Model:
    """The masks that all ranks have agreed on, and what each knows and wants."""

    def __init__(self) -> None:
        self.masked: set[int] = set()
        self.known: list[set[int]] = [set() for _ in range(RANKS)]
        self.wanted: list[dict[int, bool]] = [{} for _ in range(RANKS)]

    def view(self, rank: int) -> set[int]:
        wanted = self.wanted[rank]
        return {
            other for other in range(RANKS) if other != rank and wanted.get(other, other in self.known[rank])
        }  # nobody masks itself

    def step(self) -> list[str]:
        """Return how the step ends on each rank."""
        wanted, self.wanted = self.wanted, [{} for _ in range(RANKS)]
        taking_part = set(range(RANKS)) - self.masked
        named: set[int] = set()
        joining: set[int] = set()
        for rank in sorted(taking_part):
            if rank not in named:
                named |= {other for other, mask in wanted[rank].items() if mask and other not in self.masked}
                joining |= {other for other, mask in wanted[rank].items() if not mask and other in self.masked}
        comes_back = {rank for rank in self.masked if wanted[rank].get(rank) is False}
        here = (taking_part - named) | ((joining - named) & comes_back)
        ends = ["exact" if rank in here else "Excluded" for rank in range(RANKS)]
        for rank in comes_back - joining:
            ends[rank] = "Timeout"
        self.masked = set(range(RANKS)) - here
        for rank in here:
            self.known[rank] = set(self.masked)
        return ends


def plan(seed: int) -> list[tuple[list[tuple[int, str, int]], list[str]]]:
    """Return turns: calls of single ranks, in an order, and how the step behind them ends on each rank."""
    draw, model, turns = random.Random(seed), Model(), []
    for _ in range(8):
        calls: list[tuple[int, str, int]] = []
        for _ in range(draw.randrange(5)):
            rank, other = draw.randrange(RANKS), draw.randrange(RANKS)
            kind = draw.choice(["mask", "mask", "unmask", "clean"])
            if kind == "mask" and other != rank:
                calls.append((rank, kind, other))
            elif kind == "unmask":
                calls += [(rank, kind, other), (other, kind, other)]
            elif kind == "clean":  # as engines do: all of them
                calls += [(one, kind, 0) for one in draw.sample(range(RANKS), RANKS)]
        named = {other for rank, kind, other in calls if kind == "mask" and rank not in model.masked}
        # Of ranks that mask each other, those stay that come first: tests of their own.
        calls = [call for call in calls if call[0] not in named]
        for rank, kind, other in calls:
            if kind == "clean":
                model.wanted[rank] = dict.fromkeys(range(RANKS), False)
            else:
                model.wanted[rank][other] = kind == "mask"
        # Waits for ranks that do not come back are tests of their own, because they take as long as they may.
        back = [rank for rank in model.masked if model.wanted[rank].get(rank) is False]
        members = [rank for rank in range(RANKS) if rank not in model.masked]
        for rank in model.masked:
            asks = [one for one in members if model.wanted[one].get(rank) is False]
            if rank in back and (not asks or any(model.wanted[one].get(one2) for one in members for one2 in members)):
                calls += [(one, "clean", 0) for one in range(RANKS)]
                model.wanted = [dict.fromkeys(range(RANKS), False) for _ in range(RANKS)]
            elif asks and rank not in back:
                calls.append((rank, "unmask", rank))
                model.wanted[rank][rank] = False
        turns.append((calls, model.step()))
        assert "Timeout" not in turns[-1][1]
    return turns


@pytest.mark.parametrize("seed", few(range(60), *range(8)))
def test_random_calls_of_single_ranks_end_as_in_a_plain_model(seed: int) -> None:
    idle, turns = threading.Barrier(RANKS), plan(seed)

    def body(buffer: Buffer) -> None:
        rank, model = buffer.rank, Model()
        step(buffer)
        for number, (calls, ends) in enumerate(turns):
            idle.wait(IDLE_S)
            for caller, kind, other in calls:
                if caller == rank:
                    if kind == "clean":
                        buffer.low_latency_clean_mask_buffer()
                    else:
                        buffer.low_latency_update_mask_buffer(other, kind == "mask")
                if kind == "clean":
                    model.wanted[caller] = dict.fromkeys(range(RANKS), False)
                else:
                    model.wanted[caller][other] = kind == "mask"
                assert masked_in(buffer) == model.view(rank)
            assert model.step() == ends
            idle.wait(IDLE_S)  # a step may mask a rank
            if ends[rank] == "Excluded":
                with pytest.raises(moecomm.Excluded):
                    step(buffer, number)
            else:
                assert step(buffer, number) == model.masked, (number, calls)
            assert masked_in(buffer) == model.view(rank)
            idle.wait(IDLE_S)  # nobody leaves while another is in a step

    on_ranks(body)


def test_a_rank_that_wants_nothing_agrees_in_its_dispatch() -> None:
    """Rank 0 comes late once, then rank 1."""
    idle = threading.Barrier(RANKS)

    def body(buffer: Buffer) -> list[set[int]]:
        found = []
        for late in (0, 1):
            step(buffer)
            idle.wait(IDLE_S)
            if buffer.rank == late:
                time.sleep(0.2)
            if buffer.rank == 0:
                buffer.low_latency_update_mask_buffer(3, True)
            if buffer.rank == 3:
                with pytest.raises(moecomm.Excluded):
                    step(buffer)
            else:
                found.append(step(buffer))
            idle.wait(IDLE_S)
            if buffer.rank in (1, 3):
                buffer.low_latency_clean_mask_buffer()
            found.append(step(buffer))
            idle.wait(IDLE_S)
        return found

    once = [{3}, set()]
    assert on_ranks(body) == [[*once, *once]] * 3 + [[set(), set()]]


@pytest.mark.parametrize("late", [None, 1, 2])
def test_of_two_ranks_that_mask_each_other_one_stays(late: int | None) -> None:
    """The lower one, unless the others have agreed before it comes."""
    idle = threading.Barrier(RANKS)

    def body(buffer: Buffer) -> set[int] | None:
        step(buffer)
        idle.wait(IDLE_S)
        if buffer.rank == late:
            time.sleep(0.5)
        if buffer.rank in (1, 2):
            buffer.low_latency_update_mask_buffer(3 - buffer.rank, True)
        found = None
        try:
            found = step(buffer)
        except moecomm.Excluded:
            assert buffer.rank in (1, 2)
        idle.wait(IDLE_S)
        buffer.low_latency_clean_mask_buffer()
        assert step(buffer) == set()
        idle.wait(IDLE_S)
        return found

    found = on_ranks(body)
    out = 1 if found[1] is None else 2
    assert late is None or out == late
    assert found == [None if rank == out else {out} for rank in range(RANKS)]


def test_a_rank_that_does_not_come_back_stays_masked_and_the_wait_is_bounded() -> None:
    timeout_s, idle = 2.0, threading.Barrier(RANKS)

    def body(buffer: Buffer) -> set[int] | None:
        step(buffer)
        idle.wait(IDLE_S)
        if buffer.rank == 0:
            buffer.low_latency_update_mask_buffer(3, True)
        if buffer.rank == 3:
            with pytest.raises(moecomm.Excluded):
                step(buffer)
        else:
            step(buffer)
        idle.wait(IDLE_S)
        begin, found = time.monotonic(), None
        if buffer.rank == 3:
            idle.wait(IDLE_S)
            buffer.low_latency_clean_mask_buffer()
            with pytest.raises(moecomm.Timeout, match=r"no rank has called unmask\(\) for rank 3"):
                step(buffer)
        else:
            buffer.low_latency_clean_mask_buffer()
            found = step(buffer)  # waits for rank 3
            idle.wait(IDLE_S)
            step(buffer)
        assert timeout_s <= time.monotonic() - begin < 10 * timeout_s
        idle.wait(IDLE_S)
        return found

    assert on_ranks(body, timeout_s=timeout_s) == [{3}, {3}, {3}, None]


def test_a_rank_that_is_lost_while_ranks_agree_is_masked_too() -> None:
    idle = threading.Barrier(RANKS)

    def body(buffer: Buffer) -> set[int] | None:
        step(buffer)
        idle.wait(IDLE_S)
        if buffer.rank == 2:
            time.sleep(0.2)  # the others wait for it
            buffer.destroy()
            return None
        if buffer.rank == 0:
            buffer.low_latency_update_mask_buffer(3, True)
        if buffer.rank == 3:
            with pytest.raises(moecomm.Excluded):
                step(buffer)
            return None
        return step(buffer)

    assert on_ranks(body) == [{2, 3}, {2, 3}, None, None]


def test_what_is_pending_ends_with_the_buffer() -> None:
    def body(buffer: Buffer) -> None:
        step(buffer)
        buffer.low_latency_update_mask_buffer((buffer.rank + 1) % RANKS, True)
        with pytest.raises(moecomm.BadInput, match="this rank"):
            buffer.low_latency_update_mask_buffer(buffer.rank, True)
        buffer.destroy()
        assert masked_in(buffer) == set()

    on_ranks(body)
