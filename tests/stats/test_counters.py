"""Counters of CPU ranks: exactly the rows of the reference, waits for the rank that is late, reset and gather."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm import ops
from moecomm.base.experts import experts_of, owners_of
from moecomm.errors import BadInput, Closed
from moecomm.observe.stats import WAITS, JobStats, Stats
from moecomm.observe.stats.counters import Beside
from moecomm.observe.stats.reading import Counters
from moecomm.testing import LocalBuffers

from ..live import shorten

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 4, 10, 3, 24, 128
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": TOKENS,
    "dtype": torch.bfloat16,
    "backend": "host",
    "timeout_s": 30.0,
}
Run = Callable[[Callable[[moecomm.Buffer], Any]], list[Any]]


@contextmanager
def opened(**changed: Any) -> Iterator[Run]:
    """Buffers of all ranks, and the function that calls another on each of them, in threads."""
    with LocalBuffers(RANKS, **{**SIZES, **changed}) as ranks, ThreadPoolExecutor(RANKS) as pool:
        yield lambda body: list(pool.map(body, ranks.buffers))


def routing(seed: int) -> list[torch.Tensor]:
    """Ragged tokens of each rank, with entries of -1 and with the same expert twice."""
    g = torch.Generator().manual_seed(seed)
    tokens = [0, 1, TOKENS, TOKENS - 5]
    return [torch.randint(-1, EXPERTS, (count, TOPK), generator=g) for count in tokens]


def expected(ids: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from each rank to each, and of each expert."""
    rows = torch.zeros(RANKS, RANKS, dtype=torch.int64)
    for source, own in enumerate(ids):
        owners = torch.where(own >= 0, owners_of(own, EXPERTS, RANKS), -1)
        for rank in range(RANKS):
            rows[source, rank] = (owners == rank).any(dim=1).sum()
    return rows, torch.bincount(torch.cat(ids).flatten() + 1, minlength=EXPERTS + 1)[1:]


def x_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(ids), HIDDEN, dtype=torch.bfloat16)


def check(job: JobStats, rows: torch.Tensor, experts: torch.Tensor, row_bytes: int, rounds: int) -> None:
    """Compare with what is expected, from both ends."""
    assert torch.equal(job.rows, rows)
    assert torch.equal(job.nbytes, rows * row_bytes)
    assert torch.equal(job.rows_per_expert, experts)
    assert job.rounds.tolist() == [rounds] * RANKS
    for rank, stats in enumerate(job.by_rank):
        assert torch.equal(stats.rows_from, rows[:, rank])
        assert torch.equal(stats.bytes_from, rows[:, rank] * row_bytes)
    assert job.wait_ns.shape == (len(WAITS), RANKS, RANKS)
    assert (job.wait_ns >= 0).all()
    assert job.wait_ns.diagonal(dim1=1, dim2=2).count_nonzero() == 0


@pytest.mark.parametrize("domain_ranks", [None, 2])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_rows_are_those_of_the_routing(layout: Any, domain_ranks: int | None) -> None:
    with opened(domain_ranks=domain_ranks) as run:
        rows, experts = torch.zeros(RANKS, RANKS, dtype=torch.int64), torch.zeros(EXPERTS, dtype=torch.int64)
        for seed in range(3):
            ids = routing(seed)

            def round_of(buffer: moecomm.Buffer, ids: list[torch.Tensor] = ids) -> None:
                own = ids[buffer.rank]
                routed = buffer.dispatch(x_of(own), own, layout=layout)
                buffer.combine(torch.zeros_like(routed.x), routed.handle)

            run(round_of)
            more = expected(ids)
            rows, experts = rows + more[0], experts + more[1]
        job = run(lambda buffer: buffer.stats(gather=True))
        check(job[0], rows, experts, 2 * HIDDEN, 6)
        own = run(lambda buffer: buffer.stats())
        for rank, stats in enumerate(own):
            assert stats.lists() == job[0].by_rank[rank].lists() == job[-1].by_rank[rank].lists()
            assert len(stats.rows_per_expert) == len(experts_of(rank, EXPERTS, RANKS))
            assert (stats.retries, stats.dropped) == (0, 0)


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_a_repeat_and_a_dispatch_in_halves_count_their_rows(layout: Any) -> None:
    ids = routing(7)
    with opened() as run:

        def rounds_of(buffer: moecomm.Buffer) -> None:
            own = ids[buffer.rank]
            routed = buffer.dispatch_begin(x_of(own), own, layout=layout)
            buffer.dispatch_end(routed)
            buffer.dispatch(x_of(own), handle=routed.handle)

        run(rounds_of)
        rows, experts = expected(ids)
        check(run(lambda buffer: buffer.stats(gather=True))[0], 2 * rows, 2 * experts, 2 * HIDDEN, 2)


@pytest.mark.parametrize(("kind", "rounds", "dispatches"), [("plain", 4, 2), ("recomputed", 6, 3), ("moe", 5, 3)])
def test_backward_passes_and_recomputed_ones_count(kind: str, rounds: int, dispatches: int) -> None:
    """The backward pass of ops.moe dispatches tokens and gradients of results, and returns gradients of tokens."""
    ids = routing(7)
    w13, w2 = (torch.ones(EXPERTS, *shape, dtype=torch.bfloat16) for shape in ((32, HIDDEN), (HIDDEN, 16)))
    with opened() as run:

        def layer(x: torch.Tensor, buffer: moecomm.Buffer) -> torch.Tensor:
            if kind == "moe":
                mine = slice(buffer.local_experts[0], buffer.local_experts[-1] + 1)
                return ops.moe(buffer, x, ids[buffer.rank], None, w13[mine], w2[mine])
            routed = ops.dispatch(buffer, x, ids[buffer.rank])
            return ops.combine(routed.x * 2, routed.handle)

        def step(buffer: moecomm.Buffer) -> None:
            x = x_of(ids[buffer.rank]).requires_grad_()
            out = checkpoint(layer, x, buffer, use_reentrant=False) if kind == "recomputed" else layer(x, buffer)
            out.sum().backward()

        run(step)
        rows, experts = expected(ids)
        job = run(lambda buffer: buffer.stats(gather=True))[0]
        check(job, dispatches * rows, dispatches * experts, 2 * HIDDEN, rounds)


def test_bytes_are_those_that_travel() -> None:
    ids = routing(1)
    with opened() as run:
        run(lambda buffer: buffer.dispatch(x_of(ids[buffer.rank]), ids[buffer.rank], quantize="fp8"))
        check(run(lambda buffer: buffer.stats(gather=True))[0], *expected(ids), HIDDEN + 4, 1)


def test_dropped_entries_and_rounds_in_chunks_are_counted() -> None:
    ids = [torch.zeros(TOKENS, TOPK, dtype=torch.int64)] * RANKS
    with opened(capacity_factor=0.5) as run:
        routed = run(lambda b: b.dispatch(x_of(ids[0]), ids[0], overflow="drop"))
        dropped = [int(one.dropped) for one in routed]
        del routed
        assert min(dropped) > 0
        assert [stats.dropped for stats in run(lambda b: b.stats(reset=True))] == dropped
        run(lambda b: b.dispatch(x_of(ids[0]), ids[0]) and None)
        job = run(lambda b: b.stats(gather=True))[0]
        assert job.dropped.tolist() == [0] * RANKS
        assert job.retries.tolist() == [int(job.retries[0])] * RANKS
        assert int(job.rounds[0]) > int(job.retries[0]) > 1  # the first round had no room
        assert torch.equal(job.rows[:, 0], torch.full((RANKS,), TOKENS))


@pytest.mark.parametrize("call", [moecomm.Buffer.dispatch, ops.dispatch])
@pytest.mark.parametrize("overflow", [None, "drop"])
def test_entries_without_an_expert_are_counted(call: Any, overflow: Any) -> None:
    """Experts of rank 1 are 3 to 5, and 4 has a replica.  What a mask leaves out is not counted as dropped."""
    ids = [torch.tensor([[3, 4, 0], [5, 3, -1]][: 1 + rank % 2]) for rank in range(RANKS)]
    there = [0, 2, 3]
    with opened() as run:

        def round_of(buffer: moecomm.Buffer) -> bool:
            own = ids[buffer.rank]
            call(buffer, x_of(own), own, overflow=overflow)
            return True

        def others(body: Callable[[moecomm.Buffer], Any]) -> list[Any]:
            return [one for one in run(lambda b: body(b) if b.rank in there else None) if one is not None]

        run(round_of)
        assert run(lambda buffer: buffer.stats(gather=True))[0].masked.tolist() == [0] * RANKS
        others(lambda buffer: buffer.mask([1], replicas={4: 9}))
        assert others(round_of) == [True] * 3
        stats = others(lambda buffer: buffer.stats(reset=True))
        assert [one.masked for one in stats] == [1, 1, 3]
        assert [one.dropped for one in stats] == [0] * 3
        assert [one.masked for one in others(lambda buffer: buffer.stats())] == [0] * 3


def test_an_invalid_round_moves_no_rows() -> None:
    with opened() as run:

        def bad(buffer: moecomm.Buffer) -> Stats:
            ids = torch.full((2, TOPK), EXPERTS if buffer.rank == 1 else 0)
            with pytest.raises(BadInput):
                buffer.dispatch(x_of(ids), ids)
            return buffer.stats()

        for stats in run(bad):
            assert (stats.rounds, int(stats.rows_from.sum()), int(stats.rows_to.sum())) == (1, 0, 0)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_all_ranks_wait_for_the_one_that_is_late(phase: str) -> None:
    """The late rank calls half a second after all others have begun the round."""
    ids, late = routing(3), 2
    with opened() as run:

        def body(buffer: moecomm.Buffer) -> None:
            own = ids[buffer.rank]
            if phase == "combine":
                routed = buffer.dispatch(x_of(own), own)
            before = buffer.stats(gather=True, reset=True)  # all are here
            assert before.rounds.tolist() == [int(phase == "combine")] * RANKS
            if buffer.rank == late:
                while not all(rounds_begun(other) for other in buffers if other.rank != late):
                    time.sleep(0.001)
                time.sleep(0.5)
            if phase == "dispatch":
                buffer.dispatch(x_of(own), own)
            else:
                buffer.combine(torch.zeros_like(routed.x), routed.handle)

        buffers: list[moecomm.Buffer] = run(lambda buffer: buffer)
        run(body)
        waits = run(lambda buffer: buffer.stats(gather=True))[0].wait_ns
        header = waits[WAITS.index("header")]
        for rank in set(range(RANKS)) - {late}:
            assert header[rank, late] > 100_000_000
            assert header[rank].argmax() == late
        assert header[late].max() < header[:, late].max()


def rounds_begun(buffer: moecomm.Buffer) -> bool:
    """Return whether a rank has begun a round since its counters were reset; read beside that round."""
    words = buffer.rounds.session.read_counters()
    assert words is not None
    return Stats.of_words(words, RANKS, 1, Beside(0, 0)).rounds > 0


def test_counters_begin_anew_after_a_reset() -> None:
    ids = routing(5)
    with opened() as run:
        run(lambda b: b.dispatch(x_of(ids[b.rank]), ids[b.rank]) and None)
        run(lambda b: b.reset_stats())
        empty = run(lambda b: b.stats(gather=True))[0]
        check(empty, torch.zeros(RANKS, RANKS, dtype=torch.int64), torch.zeros(EXPERTS, dtype=torch.int64), 0, 0)
        assert int(empty.wait_ns.sum()) == 0
        run(lambda b: b.dispatch(x_of(ids[b.rank]), ids[b.rank]) and None)
        before = run(lambda b: b.stats(reset=True))
        assert [stats.rounds for stats in before] == [1] * RANKS
        assert [stats.rounds for stats in run(lambda b: b.stats())] == [0] * RANKS


def test_a_closed_buffer_has_no_counters() -> None:
    buffer = moecomm.Buffer("self", **SIZES)
    for bad in ("yes", None):
        with pytest.raises(BadInput, match="gather"):
            buffer.stats(gather=bad)  # type: ignore[call-overload]
        with pytest.raises(BadInput, match="reset"):
            buffer.stats(reset=bad)  # type: ignore[call-overload]
    buffer.close()
    assert buffer.rounds.session.read_counters() is None
    with pytest.raises(Closed):
        buffer.stats()
    with pytest.raises(Closed):
        buffer.reset_stats()


def test_counters_outlast_a_failure_and_name_who_was_missing() -> None:
    """Only this rank calls: it waits for the other until its deadline."""
    with LocalBuffers(2, **SIZES) as ranks:
        buffer = ranks.buffers[0]
        shorten(buffer, 0.2)
        ids = torch.zeros(1, TOPK, dtype=torch.int64)
        with pytest.raises(moecomm.Timeout):
            buffer.dispatch(x_of(ids), ids)
        stats = buffer.stats()
        assert stats.rounds == 1
        assert int(stats.wait_ns[0, 1]) >= 150_000_000


def test_counts_since_an_earlier_look() -> None:
    with moecomm.Buffer("self", **SIZES) as buffer:
        ids = torch.zeros(5, TOPK, dtype=torch.int64)
        buffer.dispatch(x_of(ids), ids)
        before = buffer.stats()
        buffer.dispatch(x_of(ids), ids)
        since = buffer.stats().since(before)
        assert (since.rounds, since.rows_from.tolist()) == (1, [5])
        assert msgspec.convert(since.lists(), Counters).stats(1).lists() == since.lists()
        buffer.reset_stats()
        buffer.check()
        assert buffer.stats().since(before).rounds == 0
