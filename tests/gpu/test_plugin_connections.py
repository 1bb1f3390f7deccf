"""Domains over the RMA plugin whose processes do not watch each other: a connection breaks, a rank closes."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

import moecomm
import moecomm.backends
from moecomm.backends import lsa, nic

from ..conftest import Ranks
from .test_nvlink import SMALL, open_kind, routing

KIND = "gin, 2 domains"
FIRST = 20  # rounds before a link breaks
TIMEOUT_S = 30.0


def _apart() -> None:
    """No rank watches the processes of others."""
    lsa.Presence = lambda *about: None  # type: ignore[assignment,misc,return-value]


def connections() -> dict[str, socket.socket]:
    """Return connections of this process to or from a listener of the plugin, whose name is 32 hexadecimal digits."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                ends = (one.getsockname(), one.getpeername()) if one.family == socket.AF_UNIX else ()
                if any(re.fullmatch(rb"\0[0-9a-f]{32}", bytes(end)) for end in ends if isinstance(end, bytes)):
                    found[what] = one
    return found


def _until_a_link_breaks(rank: int, group: Any) -> tuple[str, int, float, str]:
    _apart()
    before = connections()
    with open_kind(group, KIND, **SMALL, timeout_s=TIMEOUT_S) as buffer:
        links = [one for what, one in connections().items() if what not in before]
        mine = routing(rank)
        try:
            for number in range(1000):
                if rank == 1 and number == FIRST:
                    for link in links:
                        link.shutdown(socket.SHUT_RDWR)
                last = time.monotonic()
                routed = buffer.dispatch(**mine, sync=True)
                buffer.combine(routed.x, routed.handle)
                buffer.check()
        except moecomm.RoundFailed as error:
            return type(error).__name__, error.peer, time.monotonic() - last, str(error)
    return "no error", -1, 0.0, ""


def _leaves_last(rank: int, group: Any) -> float:
    """How long closing waited for the others."""
    _apart()
    linger, waited = lsa.LsaSession._linger, []

    def timed(session: lsa.LsaSession, last_round: int) -> None:
        begin = time.monotonic()
        linger(session, last_round)
        waited.append(time.monotonic() - begin)

    lsa.LsaSession._linger = timed  # type: ignore[method-assign]
    buffer = open_kind(group, KIND, **SMALL, timeout_s=TIMEOUT_S)
    mine = routing(rank)
    routed = buffer.dispatch(**mine, sync=True)
    buffer.combine(routed.x, routed.handle)
    buffer.check()
    torch.distributed.barrier(group)
    if rank == 1:
        time.sleep(0.5)
    buffer.close()
    return waited[0]


@pytest.fixture
def count() -> int:
    if reason := moecomm.backends.missing("gin") or (nic.has_rdma() and "NCCL takes the NIC, and not our plugin"):
        pytest.skip(reason)
    return min(4, torch.cuda.device_count())


@pytest.mark.gpu2
@pytest.mark.timeout(180)
def test_a_broken_link_is_a_lost_peer_long_before_the_deadline(gpu_ranks: Ranks, count: int) -> None:
    found = gpu_ranks.run(count, _until_a_link_breaks)
    for rank, (name, peer, seconds, _) in enumerate(found):
        assert name == "PeerLost" and seconds < TIMEOUT_S / 4, found
        assert (peer == 1) == (rank != 1), found
    assert any("PeerLost: " in said for *_, said in found), found


@pytest.mark.gpu2
@pytest.mark.timeout(180)
def test_who_closes_waits_for_those_who_may_still_add_to_its_signals(gpu_ranks: Ranks, count: int) -> None:
    found = gpu_ranks.run(count, _leaves_last)
    assert all(0.3 < seconds < 1.9 for rank, seconds in enumerate(found) if rank != 1), found
