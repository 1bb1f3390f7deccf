"""Ranks of a test that take too long write where they are."""

from __future__ import annotations

import queue
import signal
import threading
from typing import Any

import pytest

from .conftest import Ranks


def _stays(rank: int, group: Any) -> None:
    threading.Event().wait()


def test_each_rank_that_takes_too_long_writes_its_stacks_and_ends(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.start(2, _stays)
    with pytest.raises(queue.Empty):
        ranks.results(2, timeout_s=5)
    assert [process.exitcode for process in ranks.processes] == [-signal.SIGUSR1] * 2
    assert capfd.readouterr().err.count("in _stays") == 2
