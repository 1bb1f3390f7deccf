"""Puts, gets and signals against an oracle: processes and threads, both ways, with and without a GPU's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..few import few
from .build import TSAN, build_watched
from .conftest import Drive, run_driver

WAYS = ("loopback", "tcp")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("ranks", few((2, 3, 4), 3))
def test_every_byte_is_where_it_was_put(drive: Drive, way: str, memory: str, ranks: int) -> None:
    drive("random", way=way, memory=memory, ranks=ranks, seed=ranks, slice=500_000)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_alone(drive: Drive, way: str) -> None:
    drive("random", way=way, memory="cuda", ranks=1)


@pytest.mark.parametrize(("way", "memory"), [("loopback", "cuda"), ("tcp", "host")])
def test_many_contexts_and_short_queues(drive: Drive, way: str, memory: str) -> None:
    drive("random", way=way, memory=memory, contexts=16, queue=2, ops=40, slice=40_000, epochs=1)


@pytest.mark.parametrize("way", WAYS)
def test_long_queues(drive: Drive, way: str) -> None:
    """More signals than a mailbox has places, and more gets than may be open: they wait, in order."""
    drive("random", way=way, queue=256, contexts=8, ops=256, slice=400_000, epochs=1, memory="cuda")


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("way", WAYS)
def test_the_newer_table(drive: Drive, way: str, memory: str) -> None:
    """All of it, as the other tests do with the older one: a driver that leaves a function out says so."""
    drive("random", way=way, memory=memory, table=16, slice=100_000)


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_peer_is_waited_for(drive: Drive, way: str) -> None:
    drive("random", way=way, lag=1000, ops=30, epochs=1, slice=300_000, memory="cuda")


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
def test_some_peers_are_neighbours_and_some_are_not(drive: Drive, memory: str) -> None:
    drive("random", mixed=1, ranks=4, memory=memory, slice=100_000)


@pytest.mark.parametrize("table", few((14, 16), 16))
@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
@pytest.mark.parametrize("way", WAYS)
def test_communicators_contexts_and_memory_come_and_go(drive: Drive, way: str, memory: str, table: int) -> None:
    drive("again", way=way, memory=memory, ranks=3, table=table)


@pytest.mark.parametrize("memory", few(["host", "cuda"], "host"))
def test_ranks_of_one_process(drive: Drive, memory: str) -> None:
    drive("random", mode="threads", memory=memory, ranks=3, slice=100_000)


@pytest.mark.long
def test_threads_under_sanitizer(fake_cuda: Path, tmp_path: Path) -> None:
    driver, plugin = build_watched(tmp_path, TSAN)
    for way in WAYS:
        run_driver(driver, plugin, fake_cuda, "random", way, times="1", mode="threads", ops=24, slice=20_000, epochs=2)
