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

from .few import few

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
                    seen["bad" if bad and error.got == f"expert {EXPERTS}" else "of another thread"] += 1
            return seen

        with ThreadPoolExecutor(threads) as pool:
            seen = sum(pool.map(run, range(threads)), Counter())
        assert seen.total() == threads * calls
        assert seen["of another thread"] == 0
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
            while not buffer.rounds.turn.running:
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


def _ids_change(rank: int, group: Any, layout: str, dtype: torch.dtype) -> Counter[str]:
    """Another thread changes the ids while they are dispatched: a round is one of ids that were there, or BadInput."""
    tokens, experts, topk = 256, 12, 4
    sizes = {"hidden": HIDDEN, "num_experts": experts, "topk": topk, "max_tokens": tokens, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(rank)
    given = [torch.randint(0, experts, (tokens, topk), generator=generator).to(dtype) for _ in range(4)]
    given.append(torch.where(torch.arange(tokens)[:, None] == 77, 1 << 30, given[0]).to(dtype))
    ids, stop = given[0].clone(), threading.Event()

    def change() -> None:
        views, target = [g.numpy() for g in given], ids.numpy()
        while not stop.is_set():
            for view in views:
                target[...] = view

    changing = threading.Thread(target=change)
    changing.start()
    seen: Counter[str] = Counter()
    x = (torch.arange(tokens)[:, None] + 1000 * rank).float().expand(tokens, HIDDEN).contiguous()
    try:
        with moecomm.Buffer(group, **sizes, timeout_s=20) as buffer:
            for _ in range(150):
                try:
                    routed = buffer.dispatch(x, ids, layout=layout)
                    out = buffer.combine(routed.x, routed.handle)
                except moecomm.BadInput as error:
                    assert error.got == f"expert {1 << 30}"  # noqa: PT017
                    seen["bad"] += 1
                    continue
                assert routed.src is not None
                assert torch.equal(routed.x[:, 0].int(), 1000 * routed.src[:, 0] + routed.src[:, 1])
                if layout == "expert":
                    assert int(routed.tokens_per_expert.sum()) == len(routed.x)
                    assert torch.equal(out, topk * x)
                else:
                    assert torch.equal(out % x.clamp(min=1), torch.zeros_like(x))
                seen["right"] += 1
                del routed, out  # the window has room for two rounds
    finally:
        stop.set()
        changing.join()
    return seen


@pytest.mark.parametrize(
    ("layout", "dtype"),
    few([("expert", torch.int64), ("expert", torch.int32), ("flat", torch.int64)], ("expert", torch.int32)),
)
def test_ids_that_change_during_a_dispatch(ranks: Any, layout: str, dtype: torch.dtype) -> None:
    for seen in ranks.run(2, _ids_change, layout, dtype):
        assert min(seen["bad"], seen["right"]) > 0, seen
