"""Counters of kernels between domains name a slow link, by both its ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.observe.stats import JobStats
from moecomm.observe.stats.classify import classify
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from .machine import Machine

RANKS, TOKENS, HIDDEN, ROUNDS = 4, 8, 1024, 8
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": RANKS, "topk": 2, "max_tokens": TOKENS}
# A round takes thousands of passes, and its rows over a slow link ten times as many.
BYTE_PASSES = 4
SLOW: dict[str, tuple[list[tuple[int, int]], list[tuple[str, tuple[int, ...]]]]] = {
    "no link": ([], []),
    "one link": ([(1, 0)], [("slow link", (1, 0))]),
    "a link back": ([(2, 3)], [("slow link", (2, 3))]),
    "all links from a rank": ([(2, peer) for peer in (0, 1, 3)], [("slow sender", (2,))]),
    "all links to a rank": ([(peer, 2) for peer in (0, 1, 3)], [("slow receiver", (2,))]),
}


@pytest.fixture
def ranks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBuffers]:
    """Each is a domain of its own."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    with LocalBuffers(RANKS, **SIZES, dtype=torch.bfloat16, domain_ranks=1, backend="host") as opened:
        try:
            yield opened
        finally:
            machine.forget()


@pytest.mark.parametrize("case", SLOW)
def test_slow_links_are_named_and_nothing_else(case: str, ranks: LocalBuffers, machine: Machine) -> None:
    slow, want = SLOW[case]
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    first = torch.arange(TOKENS)
    ids = torch.stack([first % RANKS, (first + 1 + first // RANKS) % RANKS], dim=1)
    try:
        for source, to in slow:
            machine.slow_link(source, to, BYTE_PASSES)
        for _ in range(ROUNDS):
            ranks.dispatch([{"x": x, "topk_idx": ids}] * RANKS)
    finally:
        for source, to in slow:
            machine.slow_link(source, to, 0)
    job = JobStats.of_ranks([buffer.stats() for buffer in ranks.buffers])
    assert [(finding.kind, finding.where) for finding in classify(job)] == want
    assert not want or classify(job)[0].factor > 5
