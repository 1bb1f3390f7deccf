"""Where a put's time goes through GIN's proxy: parts add up to it, and are those of the way and the replay shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm_bench import latency, proxy_times

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def taken(scale: int = 1, **other: int) -> dict[str, int]:
    """Times of 10 puts + signals: 20 us each in the plugin, 5 of them in calls, 4 in the driver; then a word in 2."""
    times = {"until_ended_ns": 360_000, "busy_ns": 200_000, "posting_ns": 50_000, "driver_ns": 40_000}
    times |= {"polling_ns": 300_000, "writing_ns": 20_000, "since_ns": 500_000}
    numbers = {"clock_reads": 900, "operations": 20, "signals": 10, "bytes": 640, "ended": 20, "words": 10, "puts": 10}
    numbers |= {"polls": 400, "empty_polls": 300}
    return numbers | {name: value * scale for name, value in times.items()} | other


def rank(us: list[float], scale: int = 1, **about: Any) -> dict[str, Any]:
    row = {"bytes": 64, "method": "put, a warp", "sms": 1, "us": us} | about
    return row | {"plugin": [taken(), taken(scale), taken(50)]}


def test_parts_are_of_the_replay_in_the_middle_and_add_up() -> None:
    found = proxy_times.of_put([[30.0, 41.0, 90.0], [29.0, 42.0, 91.0]], [[taken(7), taken(), taken(9)]] * 2)
    assert found == {
        "one_way_us": 42.0,
        "posting_us": 1.0,
        "driver_us": 4.0,
        "copying_us": 15.0,
        "word_us": 2.0,
        "rest_us": 20.0,
        "operations": 2.0,
        "bytes": 64.0,
        "until_done_us": 18.0,
        "a_poll_us": 0.75,
        "polling": 0.6,
        "empty": 0.75,
        "clock_reads": 90.0,
    }


def test_parts_that_overlap_leave_no_rest() -> None:
    """Over TCP, a put is in flight until the peer acknowledges it, and the reply may come earlier."""
    found = proxy_times.of_put([[30.0], [29.0]], [[taken(busy_ns=400_000)]] * 2)
    assert found is not None and found["rest_us"] is None and found["copying_us"] == 35.0
    (rest,) = (column for column in proxy_times.FIGURES if column.head == "rest")
    assert [rest.text({"plugin": {"rest_us": us}}) for us in (found["rest_us"], -12.0, 2.0)] == ["", "", "2.00"]
    assert "no `rest`" in proxy_times.EXPLAINED


@pytest.mark.parametrize("name", ["latency-gin-tcp-h100-2", "latency-gin-tcp-h200-2", "latency-backends-h100-4"])
def test_parts_of_kept_results_are_not_negative_and_add_up(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    shown = [[column.text(row) for column in proxy_times.FIGURES[1:7]] for row in rows if "plugin" in row]
    assert shown and not any(cell.startswith("-") for cells in shown for cell in cells)
    for one_way, *parts in shown:
        if parts[-1]:
            assert sum(map(float, parts)) == pytest.approx(float(one_way), abs=0.05)


def test_of_several_ways_the_fastest_has_its_own_parts() -> None:
    slow = {"sms": 4, "method": "put"}
    a = [rank([50.0, 51.0, 52.0], 3, **slow), rank([30.0, 40.0, 41.0])]
    b = [rank([50.0, 51.0, 52.0], 3, **slow), rank([31.0, 39.0, 42.0], plugin=[])]
    (row,) = latency.merge([a, b])
    assert (row["method"], row["us"]["p50"], row["plugin"]["one_way_us"]) == ("put, a warp", 40.0, 40.0)
    assert (row["plugin"]["copying_us"], row["plugin"]["rest_us"]) == (15.0, 18.0)


@pytest.mark.parametrize("nothing", [None, taken(operations=0)])
def test_where_nothing_was_taken_there_are_no_parts(nothing: Any) -> None:
    """The plugin was told not to, or bytes go through a NIC."""
    row = {"bytes": 64, "method": "put", "sms": 1, "us": [1.0]}
    (merged,) = latency.merge([[row | {"plugin": [nothing]}]] * 2)
    assert "plugin" not in merged
    assert "plugin" not in latency.merge([[row]] * 2)[0]


class FakePlayer:
    """Takes 1 ms for half a round trip."""

    rounds: list[int]

    def __init__(self, *_: Any) -> None:
        pass

    def play(self, size: int, method: str, blocks: int, rounds: int) -> float:
        FakePlayer.rounds.append(rounds)
        return 1000.0


@pytest.mark.parametrize("shim", ["gin_proxy", "gin"])
def test_each_replay_takes_its_own_times_and_slow_ways_have_few_rounds(
    monkeypatch: pytest.MonkeyPatch, shim: str
) -> None:
    events: list[str] = []

    def take() -> dict[str, int]:
        events.append(f"take after {len(FakePlayer.rounds)}")
        return taken()

    class FakeReceiveBuffer:
        def __init__(self, *_: Any) -> None:
            self.shim = shim
            events.append(f"open, times {os.environ.get('MOECOMM_RMA_TIMES')}")

        def __enter__(self) -> FakeReceiveBuffer:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    FakePlayer.rounds = []
    gathered = SimpleNamespace(all_gather=lambda data: [data, (40).to_bytes(8, "little")])
    for name, fake in (("ReceiveBuffer", FakeReceiveBuffer), ("Player", FakePlayer), ("device_of", lambda *_: None)):
        monkeypatch.setattr(latency, name, fake)
    monkeypatch.setattr(latency, "rendezvous", lambda _: gathered)
    monkeypatch.setattr(latency.dist, "barrier", lambda _: None)
    monkeypatch.setattr(latency.rma_plugin, "take_times", take)
    group: Any = SimpleNamespace(rank=lambda: 0)
    (row,) = latency.run_rank(group, backend="gin", sizes=[64], replays=2)
    # A tenth of a second is 50 round trips, and the other rank wants 40.
    assert FakePlayer.rounds == [8, 40, 40] and row["us"] == [1000.0, 1000.0]
    assert "MOECOMM_RMA_TIMES" not in os.environ
    opened, *takes = events
    assert opened == "open, times 1"
    if shim == "gin":
        assert takes == [] and "plugin" not in row
    else:
        assert takes == ["take after 1", "take after 2", "take after 2", "take after 3"]
        assert row["plugin"] == [taken(puts=44)] * 2
