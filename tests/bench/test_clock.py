"""Percentiles of the slowest rank, and what a Clock calls, and when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moecomm_bench import clock
from moecomm_bench.clock import percentiles

from ..conftest import Ranks


def test_percentiles_are_of_the_slowest_rank_in_each_replay() -> None:
    fast, slow = [1.0] * 101, [float(n) for n in range(101)]
    assert percentiles([fast, slow]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([[3.0, 1.0], [1.0, 5.0]]) == {"p50": 4.0, "p90": 4.8, "p99": 4.98}
    assert percentiles([[7.0], [8.0]]) == {"p50": 8.0, "p90": 8.0, "p99": 8.0}


class Time:
    """In the place of the module: passes when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


def _time_calls(rank: int, group: Any, chain: int) -> tuple[list[float], float | None, int]:
    clock.time = passing = Time()  # this process is this test's
    calls = []

    def call() -> None:
        calls.append(rank)
        passing.seconds += 0.25 * (rank + 1) * (10 if len(calls) <= chain else 1)  # slow at first

    timer = clock.Clock(group, torch.device("cpu"), graph=False, cold=True, chain=chain, replays=3)
    return timer(call), timer.host_us(call), len(calls)


@pytest.mark.parametrize("chain", [1, 4])
def test_a_time_is_that_of_one_operation(ranks: Ranks, chain: int) -> None:
    """In microseconds, however many are timed together; the first replay is made and left out."""
    for rank, found in enumerate(ranks.run(2, _time_calls, chain)):
        assert found == ([0.25e6 * (rank + 1)] * 3, None, 4 * chain)


def test_every_replay_has_an_order_of_its_own_and_no_call_follows_always_the_same(ranks: Ranks) -> None:
    one, other = ranks.run(2, _turns)
    assert one == other
    turns = [one[i : i + 3] for i in range(0, len(one), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert set(itertools.pairwise(one)) >= set(itertools.permutations("abc", 2))


def _turns(rank: int, group: Any) -> list[str]:
    timer, order = clock.Clock(group, torch.device("cpu"), graph=False, cold=False, chain=1, replays=9), []
    timer._on_gpu = True
    timer._ready = lambda call, before, meet: call

    def replay_us(run: Any, meet: Any) -> float:
        order.append(run())
        return len(order)

    timer._replay_us = replay_us
    found = timer.alternately({name: lambda name=name: name for name in "abc"}, lambda: None)
    assert found == {name: [at + 1 for at in range(3, 30) if order[at] == name] for name in "abc"}  # without the first
    return order
