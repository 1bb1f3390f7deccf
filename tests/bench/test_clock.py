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


def _time_host(rank: int, group: Any, slow: float) -> tuple[float | None, int]:
    clock.time = passing = Time()
    torch.cuda.synchronize = lambda: None
    calls = []

    def call() -> None:
        calls.append(rank)
        passing.seconds += slow if rank == 1 else 1e-6

    timer = clock.Clock(group, torch.device("cpu"), graph=False, cold=False, chain=1, replays=1)
    timer._on_gpu = True
    return timer.host_us(call), len(calls)


def test_the_host_is_not_timed_for_long(ranks: Ranks) -> None:
    """Ranks end together, when one of them has been at it for two seconds."""
    for slow, many in ((0.09, 30), (1e-6, 200)):
        (fast, calls), (slowest, others) = ranks.run(2, _time_host, slow)
        assert calls == others == many
        assert fast == pytest.approx(1) and slowest == pytest.approx(slow * 1e6)


def test_two_calls_are_timed_on_the_host_one_after_the_other(ranks: Ranks) -> None:
    """So that what one of them pays the other pays as well."""
    [(order, found)] = ranks.run(1, _time_two)
    assert order == ["a", "b"] * 200
    assert [times[:3] for times in found] == [pytest.approx(us) for us in ([2, 4, 6], [3, 5, 7])]


def _time_two(rank: int, group: Any) -> tuple[list[str], list[list[float]]]:
    clock.time = passing = Time()
    torch.cuda.synchronize = lambda: None
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        passing.seconds += (len(order) + 1) * 1e-6  # slower and slower

    timer = clock.Clock(group, torch.device("cpu"), graph=False, cold=False, chain=1, replays=1)
    timer._on_gpu = True
    return order, timer.host_times(lambda: call("a"), lambda: call("b"))


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


def test_sustained_calls_repeat_as_often_on_all_ranks(ranks: Ranks) -> None:
    """A run lasts a second on the slowest rank, after a warm-up of an eighth of that; the median of three counts."""
    runs = [("b", count) for count in (84, 667)] * 3
    for rank, (order, found) in enumerate(ranks.run(2, _sustain)):
        assert [sorted(order[:2]), sorted(order[2:4])] == [["a", "b"]] * 2 and order[4:] == runs
        assert found == [{"a": [1000], "b": [1000 + rank * 500]}, {"b": 1000 + rank * 500}]


def _sustain(rank: int, group: Any) -> tuple[list[Any], list[Any]]:
    timer, order = clock.Clock(group, torch.device("cpu"), graph=True, cold=False, chain=1, replays=1), []
    timer._on_gpu = True
    timer._ready = lambda call, before, meet: call

    def replay_us(run: Any, meet: Any, times: int = 1) -> float:
        name = run()
        order.append(name if times == 1 else (name, times))
        return 1000.0 + 500 * rank * (name == "b")

    timer._replay_us = replay_us
    calls = {name: lambda name=name: name for name in "ab"}
    return order, list(timer.burst_and_sustained(calls, lambda: None, ["b"], 1.0))


@pytest.mark.parametrize(
    ("value", "places", "wanted"),
    [
        (1234.5678, 2, 1234.57),
        (1.23456, 4, 1.2346),
        (4e-5, 4, 4e-5),
        (0.012345, 2, 0.0123),
        (-4e-5, 3, -4e-5),
        (0, 4, 0),
    ],
)
def test_rounding_leaves_three_digits_of_small_figures(value: float, places: int, wanted: float) -> None:
    assert clock.rounded(value, places) == wanted
