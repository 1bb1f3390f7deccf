"""bench/engine_ranks.py, with stand-ins for an engine that succeed, fail and hang."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import engine_ranks


def keeps_a_thread(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Succeed, and leave a thread that would keep the process."""
    threading.Thread(target=threading.Event().wait).start()
    if rank == 0:
        socket.create_server(("127.0.0.1", job["port"])).close()
    return {"rank": rank, "port": job["port"], "logits": torch.full((2,), job["value"]), "parts": {rank: [(1, 0.5)]}}


def fails(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Fail on rank 1, for which the other ranks wait for ever."""
    if rank == 1:
        raise ValueError(job["why"])
    return hangs(rank, job)


def dies(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """End without a word."""
    sys.exit(7)


def hangs(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Wait for ever."""
    threading.Event().wait()
    return {}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {*multiprocessing.active_children()}
    yield
    assert {*multiprocessing.active_children()} <= before


def test_each_rank_returns_what_it_finds() -> None:
    first, second = engine_ranks.run(keeps_a_thread, {"ranks": 2, "value": 0.25}, "a run", 120)
    assert (first["rank"], second["rank"]) == (0, 1) and first["port"] == second["port"]
    assert first["logits"].tolist() == [0.25, 0.25] and second["parts"] == {1: [(1, 0.5)]}


def test_the_error_of_a_rank_ends_the_run_and_all_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1: ValueError: no such model$"):
        engine_ranks.run(fails, {"ranks": 2, "why": "no such model"}, "a run", 120)


def test_a_rank_that_ends_without_a_word_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit code 7"):
        engine_ranks.run(dies, {"ranks": 1}, "a run", 120)


def test_ranks_that_hang_are_killed_at_the_limit() -> None:
    with pytest.raises(TimeoutError, match=r"^tiny over ht: no end within 2 s$"):
        engine_ranks.run(hangs, {"ranks": 2}, "tiny over ht", 2)
