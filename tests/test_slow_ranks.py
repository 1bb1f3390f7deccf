"""A rank that is late by half of the deadline is waited for: no error, and exact results."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

from .few import few

RANKS, TIMEOUT_S, LATE_S = 3, 4.0, 1.0  # several late ranks together are later than the deadline
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 6, "topk": 2, "max_tokens": 8, "dtype": torch.float32}
POINTS = ("before the dispatch", "between its halves", "before the combine")


def late_rounds(buffer: moecomm.Buffer, rounds: int) -> int:
    """Make rounds, each with a rank that is late at a point; all draw the same.  Return how often this one was."""
    draw, late = random.Random(0), 0
    for number in range(rounds):
        rank, point = draw.randrange(RANKS), draw.choice(POINTS)

        def reach(here: str, rank: int = rank, point: str = point) -> int:
            if (buffer.rank, here) != (rank, point):
                return 0
            time.sleep(LATE_S)
            return 1

        x = torch.arange(8.0)[:, None].expand(8, 64) + buffer.rank + number
        ids = torch.stack([torch.arange(8) % 6, (torch.arange(8) + 1 + number % 5) % 6], dim=1)
        late += reach(POINTS[0])
        routed = buffer.dispatch_begin(x.contiguous(), ids)
        late += reach(POINTS[1])
        buffer.dispatch_end(routed)
        late += reach(POINTS[2])
        assert torch.equal(buffer.combine(routed.x, routed.handle), 2 * x)
    return late


@pytest.mark.timeout(900)
@pytest.mark.parametrize("delays", few((6, 20), 6))
def test_a_late_rank_is_no_false_alarm(delays: int, pytestconfig: pytest.Config) -> None:
    delays = pytestconfig.getoption("--repeats") or delays
    with (
        LocalBuffers(RANKS, **SIZES, backend="host", timeout_s=TIMEOUT_S) as ranks,
        ThreadPoolExecutor(RANKS) as pool,
    ):
        assert sum(pool.map(late_rounds, ranks.buffers, [delays] * RANKS)) == delays
