"""Rounds that must not be paired, on virtual ranks: calls that fail on one rank, changed handles, the wrap of tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm.dispatch.tables import tables_of
from moecomm.gpu.cuda_driver import int32_at
from moecomm.testing import LocalBuffers, check_case, random_case

from ..wrap import ROUNDS

pytestmark = pytest.mark.gpu1

SIZES: dict[str, Any] = {
    "ranks": 2,
    "hidden": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 32,
    "dtype": torch.bfloat16,
}
WRAPS = range(2, 8)  # rounds before the tags wrap


@pytest.fixture(params=[2, 1], ids=["one-domain", "two-domains"])
def pair(request: pytest.FixtureRequest) -> Iterator[LocalBuffers]:
    with LocalBuffers(**SIZES, domain_ranks=request.param, backend="lsa", device=0, timeout_s=2) as ranks:
        yield ranks


def call(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(20, 64, generator=g).bfloat16().cuda(),
        "topk_idx": torch.rand(20, 4, generator=g).argsort(dim=1)[:, :2].cuda(),
        "topk_weights": torch.rand(20, 2, generator=g).cuda(),
    }


def combines(routed: list[Any]) -> list[dict[str, Any]]:
    return [{"y": here.x, "handle": here.handle} for here in routed]


def fail(buffer: moecomm.Buffer) -> None:
    with pytest.raises(moecomm.BadInput):
        buffer.dispatch(torch.zeros(3, device="cuda"))


@pytest.mark.parametrize("op", ["dispatch", "combine", "dispatch again"])
def test_a_call_that_fails_on_one_rank_ends_the_next_round_on_both(pair: LocalBuffers, op: str) -> None:
    calls = [call(0), call(1)]
    for buffer in pair.buffers:
        fail(buffer)  # on both: they stay in step
    routed = pair.dispatch(calls)
    fail(pair.buffers[1])
    if op == "combine":
        pair.combine(combines(routed))
    else:
        again = [{"x": c["x"], "handle": here.handle} for c, here in zip(calls, routed, strict=True)]
        pair.dispatch(again if op == "dispatch again" else calls)
    for rank, buffer in enumerate(pair.buffers):
        with pytest.raises(moecomm.OutOfStep) as caught:
            buffer.check()
        assert (caught.value.rank, caught.value.mine) == (1 - rank, 1 + rank)
        with pytest.raises(moecomm.OutOfStep):
            buffer.dispatch(**calls[rank])


def test_a_call_that_failed_in_a_capture_ends_every_replay(pair: LocalBuffers) -> None:
    calls = [call(0), call(1)]
    pair.dispatch(calls)  # compiles before the capture
    torch.cuda.synchronize()
    graphs = []
    for buffer, given, stream in zip(pair.buffers, calls, pair.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            if buffer.rank == 1:
                fail(buffer)
            buffer.dispatch(**given)
        graphs.append(graph)
    pair.dispatch(calls)
    pair.check()  # nothing has been replayed
    for graph, stream in zip(graphs, pair.streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    for buffer in pair.buffers:
        with pytest.raises(moecomm.OutOfStep):
            buffer.check()


@pytest.mark.parametrize("op", ["combine", "dispatch again"])
def test_a_handle_that_is_none(pair: LocalBuffers, op: str) -> None:
    calls = [call(0), call(1)]
    routed = pair.dispatch(calls)
    want = pair.combine(combines(routed))
    tables = tables_of(routed[1])
    intact = tables.clone()
    g = torch.Generator().manual_seed(0)
    for what in (torch.zeros_like(tables), torch.randint(0, 256, tables.shape, dtype=torch.uint8, generator=g).cuda()):
        tables.copy_(what)
        torch.cuda.synchronize()
        if op == "combine":
            pair.combine(combines(routed))
        else:
            pair.dispatch([{"x": c["x"], "handle": here.handle} for c, here in zip(calls, routed, strict=True)])
        for buffer in pair.buffers:
            with pytest.raises(moecomm.BadInput, match=r"handle \(rank 1\)"):
                buffer.check()
        tables.copy_(intact)
        torch.cuda.synchronize()
        assert all(map(torch.equal, pair.combine(combines(routed)), want))


def wrap_after(ranks: LocalBuffers, rounds: int) -> None:
    """Leaves so many rounds before the tags wrap; before the first round."""
    begun = ROUNDS - 1 - rounds
    torch.cuda.synchronize()
    for buffer in ranks.buffers:
        context = buffer.rounds.session.context
        window = context.peers[buffer.rank]
        int32_at(window + context.window.state, buffer.device).fill_(begun)
        if (
            buffer.domain_ranks < buffer.num_ranks
        ):  # tagged_words_value of the last round, by sender: the upper half of a word
            for sender in range(buffer.num_ranks):
                word = int32_at(window + context.window.signals + 8 * sender + 4, buffer.device)
                word.fill_((2 * begun + ROUNDS) % (2 * ROUNDS) - ROUNDS)
    torch.cuda.synchronize()


def seeds(rounds: int) -> range:
    return range(100 * rounds, 100 * rounds + 6)


@pytest.mark.parametrize("rounds", WRAPS)
def test_random_cases_across_the_wrap_of_tags(pair: LocalBuffers, rounds: int) -> None:
    wrap_after(pair, rounds)
    for seed in seeds(rounds):
        check_case(pair, random_case(seed, **SIZES, few_kernels=True))
    context = pair.buffers[0].rounds.session.context
    begun = int(int32_at(context.peers[0] + context.window.state, pair.buffers[0].device))
    assert begun < 1000, "the wrap lies behind"
