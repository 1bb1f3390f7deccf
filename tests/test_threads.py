"""A Buffer is for one thread at a time: calls of others are refused by name, and disturb nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import ops

HIDDEN, EXPERTS, TOPK, TOKENS = 16, 4, 2, 5
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": 8,
    "dtype": torch.float32,
}
IDS = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2], [0, 2]])


def rows_of(thread: int) -> torch.Tensor:
    return torch.full((TOKENS, HIDDEN), float(thread + 1)) + torch.arange(TOKENS)[:, None] / 8


def one_call(buffer: moecomm.Buffer, kind: int, thread: int, bad: bool) -> None:
    """Raises AssertionError for a wrong result."""
    x, ids = rows_of(thread), IDS.clone()
    if bad:
        ids[thread % TOKENS, 0] = EXPERTS
    if kind == 0:
        routed = buffer.dispatch(x, ids)
        assert not bad
        expert_major = torch.cat([x[(ids == expert).any(dim=1)] for expert in range(EXPERTS)])
        assert torch.equal(routed.x, expert_major)
    elif kind == 1:
        arrived = ops.dispatch(buffer, x, ids)
        assert not bad
        assert arrived.x.sum() == TOPK * x.sum()
    else:
        w = torch.zeros(EXPERTS, 8, HIDDEN), torch.zeros(EXPERTS, HIDDEN, 4)
        out = buffer.moe(x, ids, None, *w, bias=x)
        assert not bad
        assert torch.equal(out, x)


def test_errors_and_results_are_those_of_the_callers_own_call() -> None:
    threads, calls = 8, 60
    start = threading.Barrier(threads)
    with moecomm.Buffer(None, **SIZES) as buffer:

        def run(thread: int) -> Counter[str]:
            seen: Counter[str] = Counter()
            start.wait()
            for call in range(calls):
                bad = (thread + call) % 3 == 0
                try:
                    one_call(buffer, call % 3, thread, bad)
                    seen["right"] += 1
                except moecomm.ConcurrentCall:
                    seen["refused"] += 1
                except moecomm.BadInput as error:
                    assert bad, error
                    assert f"expert {EXPERTS}" in str(error)
                    seen["bad"] += 1
            return seen

        with ThreadPoolExecutor(threads) as pool:
            seen = sum(pool.map(run, range(threads)), Counter())
        assert seen.total() == threads * calls
        assert min(seen["right"], seen["bad"]) > 0, seen
        one_call(buffer, 0, 0, False)  # when all have returned any thread may use it


def _first_waits(rank: int, group: Any) -> list[str]:
    """Rank 0 is in a dispatch, and calls of its other threads are refused, until rank 1 comes."""
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20)
    seen = []
    if rank == 1:
        dist.barrier(group)
        dist.barrier(group)
        routed = buffer.dispatch(rows_of(1), IDS)
    else:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(buffer.dispatch, rows_of(0), IDS)
            while not buffer._running:
                time.sleep(0.001)
            dist.barrier(group)
            for call in (
                lambda: buffer.dispatch(rows_of(0).double(), IDS),
                lambda: buffer.dispatch_begin(rows_of(0), IDS),
                lambda: ops.dispatch(buffer, rows_of(0), IDS),
                buffer.check,
            ):
                with pytest.raises(moecomm.ConcurrentCall):
                    call()
                seen.append("refused")
            assert not waiting.done()
            dist.barrier(group)
            routed = waiting.result()
    x = torch.cat([rows_of(0), rows_of(1)])
    ids = torch.cat([IDS, IDS])
    here = range(2 * rank, 2 * rank + 2)
    assert torch.equal(routed.x, torch.cat([x[(ids == expert).any(dim=1)] for expert in here]))
    with pytest.raises(moecomm.OutOfStep) as error:  # three calls of rank 0 were refused, none of rank 1
        buffer.dispatch(rows_of(rank), IDS)
    assert (error.value.mine, error.value.theirs) == ((3, 0) if rank == 0 else (0, 3))
    buffer.close()
    return seen


def test_a_refused_call_disturbs_nothing_and_is_counted(ranks: Any) -> None:
    assert ranks.run(2, _first_waits) == [["refused"] * 4, []]
