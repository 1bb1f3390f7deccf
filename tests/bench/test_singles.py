"""Single calls: how many of each input, in which order on a stream, and when CPU ranks start."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from moecomm_bench import singles
from moecomm_bench.singles import Singles
from moecomm_bench.start import on_host

from ..conftest import Ranks


def _moments(rank: int, group: Any) -> list[tuple[float, float]]:
    found = []
    for _ in range(20):
        if rank == 1:
            time.sleep(0.002)  # comes late
        arrived = time.perf_counter()
        on_host(group)
        found.append((arrived, time.perf_counter()))
    return found


def test_no_cpu_rank_starts_before_all_have_arrived(ranks: Ranks) -> None:
    for starts in zip(*ranks.run(2, _moments), strict=True):
        assert min(begin for _, begin in starts) > max(arrived for arrived, _ in starts)


def _shares(rank: int, group: Any) -> tuple[list[float], list[tuple[str, bool]], dict[str, Any]]:
    calls = []
    with Singles(group, torch.device("cpu"), 7) as timer:

        def call(name: str) -> None:
            calls.append((name, bool(timer._filler[0])))
            timer._filler.zero_()

        times = timer([lambda name=name: call(name) for name in "abc"])
        return times, calls, timer.about()


def test_inputs_share_the_calls_and_each_finds_the_caches_flushed(ranks: Ranks) -> None:
    for times, calls, about in ranks.run(2, _shares):
        assert len(times) == 7 and min(times) > 0
        assert Counter(name for name, _ in calls) == {"a": 2 + 1, "b": 2 + 1, "c": 3 + 1}
        assert all(flushed for _, flushed in calls)
        assert about == {"calls": 7, "floor_us": None, "step_ns": None}


class Start:
    """A start that notes what is enqueued."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.order: list[str] = []

    def begin(self) -> None:
        self.order.append("begin")

    def finish(self) -> None:
        self.order.append("finish")

    def us(self) -> float:
        self.order.append("read")
        return float(len(self.order))

    def step_ns(self) -> int:
        return 32

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *error: object) -> None:
        self.order.append("closed")


@pytest.mark.parametrize(("graph", "period"), [(False, 1), (True, 1), (True, 3)])
def test_the_device_takes_the_time_of_nothing_but_the_call(
    monkeypatch: pytest.MonkeyPatch, graph: bool, period: int
) -> None:
    captured = []
    monkeypatch.setattr(singles, "DeviceStart", Start)
    monkeypatch.setattr(singles, "captured", lambda call: (captured.append(call), call)[1])
    monkeypatch.setitem(singles.FLUSH_BYTES, "cuda", 1)
    real = torch.zeros
    monkeypatch.setattr(singles.torch, "zeros", lambda size, **given: real(size, dtype=given["dtype"]))
    with Singles(None, torch.device("cuda"), 4) as timer:
        order = timer._start.order
        timer._filler = type("Filler", (), {"fill_": lambda self, value: order.append("flush")})()
        times = timer([lambda: order.append("a"), lambda: order.append("b")], graph, period)
        one = [*["a"] * (period - 1), "flush", "begin", "a", "finish", "read"]
        assert order == one * (1 + 3 + 2) + [{"a": "b"}.get(word, word) for word in one * (1 + 3 + 2)]
        assert len(times) == 4 and len(captured) == 2 * graph
        assert timer.about()["floor_us"][0] > 0 and timer.about()["step_ns"] == 32
    assert order[-1] == "closed"
