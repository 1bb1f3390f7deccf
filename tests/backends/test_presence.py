"""Who leaves may wait for the others, and never longer than it said."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from moecomm import _native
from moecomm.backends.presence import Presence
from moecomm.rendezvous import ProcessGroup

from ..conftest import Ranks


def _leave(rank: int, group: Any, how: str) -> float:
    control = _native.host_alloc(64)
    presence = Presence(ProcessGroup(group), control.address, 20)
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(0.3 if how == "leaves" else 60)
    begin = time.monotonic()
    presence.leave(0.6 if how == "stays" else 20.0)
    return time.monotonic() - begin


@pytest.mark.parametrize("how", ["leaves", "dies", "stays"])
def test_lingering_ends(ranks: Ranks, how: str) -> None:
    ranks.start(2, _leave, how)
    found = ranks.results(2 if how == "leaves" else 1)
    assert found[0] < 15 and (how != "stays" or found[0] >= 0.6)
    assert how != "leaves" or found[0] >= 0.2, "it waited for rank 1"
