"""abort() from another thread at a random moment: every rank that waits raises Aborted soon, and all can close."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

from .few import few
from .live import FAR_S, ROOM_S

RANKS = 3
SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": 6,
    "topk": 2,
    "max_tokens": 8,
    "backend": "host",
    "timeout_s": FAR_S,
}
LATEST_S = 0.02  # after which abort() is called
X, IDS = torch.ones(8, 64).bfloat16(), torch.arange(16).view(8, 2) % 6


def dispatches(buffer: moecomm.Buffer, rounds: int) -> None:
    for _ in range(rounds):
        buffer.dispatch(X, IDS)


def seconds_until_all_know(pool: ThreadPoolExecutor, draw: random.Random) -> float:
    """Open, leave the last rank out after some rounds, abort one of the others, and close."""
    with LocalBuffers(RANKS, **SIZES) as ranks:
        begun, rounds = threading.Barrier(RANKS + 1), draw.randrange(3)

        def until_aborted(buffer: moecomm.Buffer) -> float:
            begun.wait()
            with pytest.raises(moecomm.Aborted):
                dispatches(buffer, rounds + 1)
            return time.monotonic()

        def stays_away(buffer: moecomm.Buffer) -> None:
            begun.wait()
            with suppress(moecomm.Aborted):
                dispatches(buffer, rounds)

        *others, last = ranks.buffers
        away = pool.submit(stays_away, last)
        waiting = [pool.submit(until_aborted, buffer) for buffer in others]
        begun.wait()
        time.sleep(draw.uniform(0, LATEST_S))
        aborted = time.monotonic()
        draw.choice(others).abort()
        took = max(one.result() for one in waiting) - aborted
        away.result()
        for closing in [pool.submit(buffer.close) for buffer in ranks.buffers]:
            closing.result()
    return took


@pytest.mark.parametrize("aborts", few((40, 200), 40))
def test_all_that_wait_are_told_soon(aborts: int, pytestconfig: pytest.Config) -> None:
    aborts = pytestconfig.getoption("--repeats") or aborts
    draw = random.Random(0)
    with ThreadPoolExecutor(RANKS) as pool:
        took = [seconds_until_all_know(pool, draw) for _ in range(aborts)]
    print(f"{aborts} aborts: median {1e3 * median(took):.1f} ms, longest {1e3 * max(took):.1f} ms")
    assert median(took) < FAR_S / 100 and max(took) < ROOM_S


@pytest.mark.parametrize("how", ["close", "delete"])
def test_peers_of_a_rank_that_aborts_in_no_call_and_closes_do_not_wait(how: str) -> None:
    """They hear of it when it closes: no round has told them."""
    closed = threading.Event()

    def aborts(opened: list[moecomm.Buffer]) -> None:
        opened[0].abort()
        if how == "close":
            opened[0].close()
        opened.clear()
        closed.set()

    def goes_on(buffer: moecomm.Buffer) -> None:
        assert closed.wait(60)
        with pytest.raises(moecomm.PeerLost, match="rank 1 is gone"):
            dispatches(buffer, 1)

    with LocalBuffers(RANKS, **SIZES) as ranks, ThreadPoolExecutor(RANKS) as pool:
        one = pool.submit(aborts, [ranks.buffers.pop(1)])
        for each in [one, *(pool.submit(goes_on, buffer) for buffer in ranks.buffers)]:
            each.result()
