"""Ranks without shared memory, as on several hosts, agree over the store of their group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moecomm
from moecomm.ranks import opening

from ..conftest import Ranks
from ..few import few
from ..live import ROOM_S
from .test_masking import exact_round, rounds
from .test_membership import SIZES, failure_of, sums
from .test_opening import group_of_a_tcp_store

TIMEOUT_S = 3.0
EXACT = 20
AGREE: dict[str, Callable[[moecomm.Buffer], Any]] = {"shrink": moecomm.Buffer.shrink, "mask": moecomm.Buffer.mask}


def apart(rank: int, group: Any, folder: str, **options: Any) -> moecomm.Buffer:
    """Open a Buffer over a group whose store rank 0 has; no rank sees the pages of others."""
    found = group_of_a_tcp_store(rank, group.size(), f"{folder}/port")
    buffer = moecomm.Buffer(found, **{**SIZES, **options}, timeout_s=TIMEOUT_S)
    assert buffer.rounds.session.pages is not None
    buffer.rounds.session.pages = None
    group.barrier().wait()
    return buffer


def without_another(rank: int, group: Any, folder: str, call: str) -> Any:
    """Rank 1 dies; the store lives, of which rank 2 asks last, when rank 0 has gone on."""
    buffer = apart(rank, group, folder)
    rounds(buffer, 3)
    if rank == 2:
        exchange = opening.Opening._exchange

        def late(ranks: opening.Opening, step: str, mine: bytes) -> list[bytes]:
            found = exchange(ranks, step, mine)
            time.sleep(0.5 if step == "ready" else 0.0)
            return found

        opening.Opening._exchange = late  # type: ignore[method-assign]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert isinstance(failure_of(lambda: exact_round(buffer, 0)), moecomm.PeerLost)
    found = AGREE[call](buffer)
    if call == "mask":
        rounds(buffer, EXACT)
    else:
        for _ in range(EXACT):
            sums(buffer)
    buffer.rounds.session.synchronize()
    group_of_survivors(folder, rank).barrier().wait()  # the store goes with rank 0
    return found


def group_of_survivors(folder: str, rank: int) -> Any:
    """A gloo group of ranks 0 and 2 over a file, a store without a process."""
    store = dist.FileStore(f"{folder}/left", 2)
    return dist.ProcessGroupGloo(store, (0, None, 1)[rank], 2)


@pytest.mark.parametrize("call", AGREE)
def test_they_agree_while_the_store_lives(ranks: Ranks, tmp_path: Path, call: str) -> None:
    ranks.start(3, without_another, str(tmp_path), call)
    want = moecomm.Shrunk((0, 2), (1,)) if call == "shrink" else (1,)
    assert ranks.results(2) == {0: want, 2: want}


def without_the_store(rank: int, group: Any, folder: str, call: str, how: int) -> Any:
    """Rank 0 dies, or stops, and the store with it."""
    buffer = apart(rank, group, folder)
    rounds(buffer, 3)
    if rank == 0:
        os.kill(os.getpid(), how)
    failure_of(lambda: exact_round(buffer, 0))
    begin = time.monotonic()
    with pytest.raises(moecomm.RoundFailed, match=r"the store of their group is lost .*; pass group=") as error:
        AGREE[call](buffer)
    seconds = time.monotonic() - begin
    about = type(error.value), error.value.peer, error.value.phase, error.value.op
    other = dist.ProcessGroup(dist.FileStore(f"{folder}/other", 2), rank - 1, 2)
    assert buffer.shrink(other) == ((1, 2), (0,))
    for _ in range(EXACT):
        sums(buffer)
    buffer.close()
    return about, seconds < ROOM_S


@pytest.mark.parametrize("call", AGREE)
@pytest.mark.parametrize("how", few((signal.SIGKILL, signal.SIGSTOP), signal.SIGKILL))
def test_the_store_is_lost(ranks: Ranks, tmp_path: Path, how: int, call: str) -> None:
    ranks.start(3, without_the_store, str(tmp_path), call, how)
    kind = moecomm.PeerLost if how == signal.SIGKILL else moecomm.Timeout
    want = (kind, -1, "agreement", call), True
    assert ranks.results(2) == {1: want, 2: want}


def masks_by_itself(rank: int, group: Any, folder: str) -> Any:
    buffer = apart(rank, group, folder, on_timeout="mask")
    rounds(buffer, 3)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure_of(lambda: exact_round(buffer, 0))
    return type(error), "could not be masked: the ranks that are left can't agree" in str(error), buffer.failed


def test_nobody_is_masked_without_the_store(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(3, masks_by_itself, str(tmp_path))
    assert ranks.results(2) == dict.fromkeys((1, 2), (moecomm.PeerLost, True, True))
