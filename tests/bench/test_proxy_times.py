"""Where a put's time goes through GIN's proxy: parts add up to it, and are those of the way and the replay shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moecomm_bench import proxy_times

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def taken(scale: int = 1, **other: int) -> dict[str, int]:
    """Times of 10 puts + signals: 20 us each in the plugin, 5 of them in calls, 4 in the driver; then a word in 2."""
    times = {"until_ended_ns": 360_000, "busy_ns": 200_000, "posting_ns": 50_000, "driver_ns": 40_000}
    times |= {"polling_ns": 300_000, "writing_ns": 20_000, "since_ns": 500_000}
    numbers = {"clock_reads": 900, "operations": 20, "signals": 10, "bytes": 640, "ended": 20, "words": 10, "puts": 10}
    numbers |= {"polls": 400, "empty_polls": 300}
    return numbers | {name: value * scale for name, value in times.items()} | other


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


@pytest.mark.parametrize("name", ["latency-backends-h200-4", "latency-backends-h100-4"])
def test_parts_of_kept_results_are_not_negative_and_add_up(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    shown = [[column.text(row) for column in proxy_times.FIGURES[1:7]] for row in rows if "plugin" in row]
    assert shown and not any(cell.startswith("-") for cells in shown for cell in cells)
    for one_way, *parts in shown:
        if parts[-1]:
            assert sum(map(float, parts)) == pytest.approx(float(one_way), abs=0.05)


class FakePlayer:
    """Takes 1 ms for half a round trip."""

    rounds: list[int]

    def __init__(self, *_: Any) -> None:
        pass

    def play(self, size: int, method: str, blocks: int, rounds: int) -> float:
        FakePlayer.rounds.append(rounds)
        return 1000.0
