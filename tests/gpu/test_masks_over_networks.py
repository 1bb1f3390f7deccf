"""Masked ranks between domains that NCCL GIN or NVSHMEM connects: named ones come back, killed ones do not."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
import torch

import moecomm
import moecomm.backends
from moecomm.base.experts import experts_of

from ..conftest import Ranks
from .kills import LATEST_S, SIZES, exact_round, sums_of, tokens_of
from .test_nvlink import backend_of, open_kind, require

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(200)]
KINDS = ["gin, 2 domains", "nvshmem network, 2 domains"]
EXACT = 50  # rounds after each step


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One that can run here."""
    return require(request.param)


def _captured(buffer: moecomm.Buffer, given: dict[str, torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = buffer.dispatch(**given)
        out = buffer.combine(routed.x, routed.handle, wire="exact")
    return graph, out


def _goes_and_comes(rank: int, group: Any, kind: str, direct: bool) -> tuple[int, ...]:
    if not direct:
        moecomm.backends.load(backend_of(kind)).direct_bytes = lambda *_: 0  # type: ignore[method-assign]
    buffer = open_kind(group, kind, **SIZES, timeout_s=10, on_timeout="mask")
    given = tokens_of(rank, buffer.device)
    everybody, others = sums_of(given), sums_of(given, experts_of(1, SIZES["num_experts"], group.size()))
    exact_round(buffer, given, everybody)
    graph, out = _captured(buffer, given)

    def rounds(want: torch.Tensor) -> None:
        for _ in range(EXACT):
            exact_round(buffer, given, want)
            graph.replay()
            buffer.check()
            assert torch.equal(out, want)

    for _ in range(2):
        rounds(everybody)
        torch.distributed.barrier(group)
        if rank != 1:
            assert buffer.mask([1]) == (1,)
            rounds(others)
        torch.distributed.barrier(group)
        if rank == 1 and buffer.domain_ranks > 1:  # a neighbour has told it
            with pytest.raises(moecomm.Excluded):
                buffer.dispatch(**given, sync=True)
        assert buffer.unmask([1]) == ()
    rounds(everybody)
    torch.distributed.barrier(group)
    buffer.close()
    return buffer.masked


@pytest.mark.parametrize("direct", [True, False], ids=["direct where it can be", "by forwarders"])
def test_a_named_rank_goes_and_comes_back(gpu_ranks: Ranks, kind: str, direct: bool) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _goes_and_comes, kind, direct)
    assert gpu_ranks.results(count, timeout_s=150) == dict.fromkeys(range(count), ())


def _rounds_for_ever(buffer: moecomm.Buffer, given: dict[str, torch.Tensor]) -> None:
    while True:
        exact_round(buffer, given, sums_of(given))


def _goes_on(rank: int, group: Any, kind: str, seed: int) -> tuple[int, ...]:
    buffer = open_kind(group, kind, **SIZES, timeout_s=5)
    given = tokens_of(rank, buffer.device)
    for _ in range(3):
        exact_round(buffer, given, sums_of(given))
    if rank == 1:
        after_s = random.Random(seed).uniform(0, LATEST_S)
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(moecomm.PeerLost):
        _rounds_for_ever(buffer, given)
    buffer.mask()
    for _ in range(EXACT):
        exact_round(buffer, given, sums_of(given, experts_of(1, SIZES["num_experts"], group.size())))
    buffer.close()
    return buffer.masked


@pytest.mark.parametrize("seed", range(2))
def test_the_others_go_on_after_a_kill(gpu_ranks: Ranks, kind: str, seed: int) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _goes_on, kind, seed)
    left = set(range(count)) - {1}
    assert gpu_ranks.results(count - 1, timeout_s=150) == dict.fromkeys(left, (1,))
