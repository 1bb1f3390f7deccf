"""Counters of virtual ranks that share a GPU: exact rows, replays of a graph, and the wait for a rank that is late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moecomm.observe.stats import WAITS, JobStats
from moecomm.testing import LocalBuffers

from ..stats.test_counters import HIDDEN, RANKS, SIZES, check, expected, routing, x_of

pytestmark = pytest.mark.gpu1
ON_GPU: dict[str, Any] = {**SIZES, "backend": "lsa", "device": 0, "timeout_s": 10}


def counters(ranks: LocalBuffers) -> JobStats:
    ranks.check()
    return JobStats.of_ranks([buffer.stats() for buffer in ranks.buffers])


@pytest.mark.parametrize("max_tokens", [24, 512])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_rows_are_those_of_the_routing(layout: Any, max_tokens: int) -> None:
    """Count few tokens, which travel in packets, and those in a Buffer for many."""
    with LocalBuffers(RANKS, **{**ON_GPU, "max_tokens": max_tokens}) as ranks:
        rows, experts = torch.zeros(RANKS, RANKS, dtype=torch.int64), 0
        for seed in range(3):
            ids = routing(seed)
            calls = [{"x": x_of(own).cuda(), "topk_idx": own.cuda(), "layout": layout} for own in ids]
            routed = ranks.dispatch(calls)
            ranks.combine([{"y": torch.zeros_like(one.x), "handle": one.handle} for one in routed])
            ranks.dispatch([{"x": call["x"], "handle": one.handle} for call, one in zip(calls, routed, strict=True)])
            more = expected(ids)
            rows, experts = rows + 2 * more[0], experts + 2 * more[1]
        check(counters(ranks), rows, experts, 2 * HIDDEN, 9)
        for buffer in ranks.buffers:
            buffer.reset_stats()
        check(counters(ranks), torch.zeros_like(rows), torch.zeros_like(experts), 0, 0)


def test_a_rank_that_is_late_is_waited_for() -> None:
    late = 1
    with LocalBuffers(2, **ON_GPU) as ranks:
        ids = torch.tensor([[0, 5, 9]]).expand(8, 3).contiguous().cuda()
        call = {"x": x_of(ids).cuda(), "topk_idx": ids}
        ranks.dispatch([call, call])
        ranks.check()
        for buffer in ranks.buffers:
            buffer.reset_stats()
        ranks.check()
        for rank in (0, 1):
            with torch.cuda.stream(ranks.streams[rank]):
                if rank == late:
                    time.sleep(0.3)
                ranks.buffers[rank].dispatch(**call)
        waits = counters(ranks).wait_ns[WAITS.index("header")]
        assert 200_000_000 < int(waits[0, late]) < 2_000_000_000
        assert int(waits[late, 0]) < 50_000_000


def test_replays_of_a_graph_count() -> None:
    with LocalBuffers(1, **ON_GPU) as ranks:
        [buffer] = ranks.buffers
        ids = torch.tensor([[0, 5, 9]]).expand(8, 3).contiguous().cuda()
        x = x_of(ids).cuda()
        with torch.cuda.stream(ranks.streams[0]):
            buffer.dispatch(x, ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=ranks.streams[0]):
                buffer.dispatch(x, ids)
            buffer.reset_stats()
            for _ in range(5):
                graph.replay()
            stats = buffer.stats()
        assert (stats.rounds, stats.rows_from.tolist()) == (5, [40])
