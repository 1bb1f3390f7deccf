"""The classifier on real CPU ranks: it names the slow rank and the hot expert, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moecomm
from moecomm.observe.stats import JobStats
from moecomm.observe.stats.classify import Finding, classify
from moecomm.testing import LocalBuffers

RANKS, EXPERTS, TOPK, TOKENS = 4, 8, 2, 64
ROUNDS, SLOW_ROUNDS, MOST_JOBS = 30, 6, 5
SLOW_S, SLOW_FACTOR = 0.1, 10  # more than the 60 ms of a few stalls, and than rounds take on a busy machine
SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": TOKENS,
    "dtype": torch.bfloat16,
    "backend": "host",
    "timeout_s": 60.0,
}
Draw = Callable[[torch.Generator], torch.Tensor]


def even(g: torch.Generator) -> torch.Tensor:
    """Two experts of each token, all equally often."""
    first = (torch.randperm(TOKENS, generator=g) % EXPERTS)[:, None]
    return torch.cat([first, (first + 1) % EXPERTS], dim=1)


def skewed(g: torch.Generator) -> torch.Tensor:
    """Every token also chooses expert 5."""
    return torch.tensor([[token % EXPERTS if token % EXPERTS != 5 else 0, 5] for token in range(TOKENS)])


def of_job(draw: Draw, rounds: int = ROUNDS, slow: int | None = None) -> list[Finding]:
    """Return what stands out in a job of which one rank may sleep before each dispatch.

    That rank sleeps ten times as long as the rounds before took, so it is slow on a busy machine, too.
    """

    def body(buffer: moecomm.Buffer) -> JobStats:
        g = torch.Generator().manual_seed(buffer.rank)
        slept, x = 0.0, torch.ones(TOKENS, 64, dtype=torch.bfloat16)
        buffer.stats(gather=True, reset=True)  # all are here
        began = time.monotonic()
        for number in range(rounds):
            if buffer.rank == slow:
                took = (time.monotonic() - began - slept) / max(1, number)
                wait = max(SLOW_S, SLOW_FACTOR * took)
                time.sleep(wait)
                slept += wait
            routed = buffer.dispatch(x, draw(g))
            buffer.combine(routed.x, routed.handle)
        return buffer.stats(gather=True)

    with LocalBuffers(RANKS, **SIZES) as ranks, ThreadPoolExecutor(RANKS) as pool:
        job, *_ = pool.map(body, ranks.buffers)
    return classify(job)


def named(found: list[Finding]) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.where) for finding in found]


def healthy_jobs(draw: Draw) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield what stands out in one job after the other.

    A busy machine may keep a rank from its cores, so that the rank truly comes late.  It does not in all of these jobs.
    """
    for _ in range(MOST_JOBS):
        yield named(of_job(draw))


def test_a_healthy_job_has_nothing_that_stands_out() -> None:
    assert [] in healthy_jobs(even)


def test_a_hot_expert_is_named_and_nothing_else() -> None:
    assert [("hot expert", (5,))] in healthy_jobs(skewed)


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_sleeps_before_each_dispatch_is_named_and_nothing_else(slow: int) -> None:
    [finding] = of_job(even, SLOW_ROUNDS, slow)
    assert (finding.kind, finding.where) == ("slow rank", (slow,))
    assert finding.text.startswith(f"rank {slow} comes late: all other ranks wait for it, ")
