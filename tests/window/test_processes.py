"""Windows of CPU ranks that are processes: values, killed ranks, Ctrl-C, and forks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm

from ..conftest import Ranks
from ..live import FAR_S, ROOM_S

HOST: dict[str, Any] = {"backend": "host", "timeout_s": FAR_S}


def ring(rank: int, group: Any) -> list[float]:
    """All-gather: in each step every rank passes the row on that came last."""
    ranks, row = group.size(), 16
    with moecomm.Window(group, ranks * row * 4, **HOST) as window:
        rows = window.tensor((ranks, row), torch.float32)
        rows[rank] = rank + 1
        next_rank = (rank + 1) % ranks
        window.barrier()
        for step in range(ranks - 1):
            mine = (rank - step) % ranks
            window.put(rows[mine], next_rank, offset=mine * row * 4, signal=0)
            window.wait(0, step + 1, peer=(rank - 1) % ranks)
        window.barrier()
        return rows.sum(dim=1).tolist()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_ring_all_gather(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, ring) == [[16.0 * (rank + 1) for rank in range(count)]] * count


def _in_sub_group(rank: int, group: Any) -> list[float]:
    return ring(rank // 2, [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2])


def test_sub_groups(ranks: Ranks) -> None:
    assert ranks.run(4, _in_sub_group) == [[16.0, 32.0]] * 4


def _wait_for_a_rank_that_dies(rank: int, group: Any, how: str) -> Any:
    window = moecomm.Window(group, 64, **HOST)
    dist.barrier()  # all have opened
    if rank == 1:
        time.sleep(0.2)  # long enough that the others wait, mostly; they need not
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if how == "barrier":
            window.barrier()
        else:
            window.wait(0, 1)  # nobody is named
    except moecomm.PeerLost as error:
        window.close()
        return error.peer, error.rank, error.op, time.monotonic() - started
    return None


@pytest.mark.parametrize("how", ["barrier", "wait"])
def test_survivors_name_a_killed_rank(ranks: Ranks, how: str) -> None:
    ranks.start(3, _wait_for_a_rank_that_dies, how)
    found = ranks.results(2)
    assert sorted(found) == [0, 2]
    for rank, (peer, noticed_by, op, seconds) in found.items():
        assert (peer, noticed_by, op) == (1, rank, how) and seconds < ROOM_S, found


def _killed_between_calls(rank: int, group: Any) -> str:
    window = moecomm.Window(group, 64, **HOST)
    window.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            window.signal(1, 0)
        except moecomm.PeerLost as error:
            return f"{error.peer} {window.failed}"
    return "not noticed"


def test_a_rank_that_died_is_noticed_without_a_wait(ranks: Ranks) -> None:
    ranks.start(2, _killed_between_calls)
    assert ranks.results(1) == {0: "1 True"}


def _leaves_and_ends(rank: int, group: Any) -> int:
    """A rank that has closed may end; the others go on without it."""
    window = moecomm.Window(group, 64, **HOST)
    window.barrier()
    if rank == 0:
        window.close()
        return 0
    for turn in range(200):
        window.signal(3 - rank, 0)
        window.wait(0, turn + 1, peer=3 - rank)
    window.close()
    return 1


def test_a_rank_that_closes_and_ends_disturbs_nobody(ranks: Ranks) -> None:
    assert ranks.run(3, _leaves_and_ends) == [0, 1, 1]


def _interrupted(rank: int, group: Any) -> str:
    window = moecomm.Window(group, 64, **HOST)
    window.barrier()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        window.wait(0, 1)
    except KeyboardInterrupt:
        return "interrupted"
    except moecomm.Aborted as error:
        return f"aborted by {error.peer}"
    return "not ended"


def test_an_interrupt_ends_the_waits_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, _interrupted) == ["interrupted", "aborted by 0"]


def _closed_in_a_handler(rank: int, group: Any) -> str:
    window = moecomm.Window(group, 64, **HOST)
    signal.signal(signal.SIGALRM, lambda *of: window.close())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(moecomm.Aborted):
        window.wait(0, 1)
    return f"{window.closed} {window._opened.closed}"


def test_a_handler_may_close_the_window_that_waits(ranks: Ranks) -> None:
    assert ranks.run(1, _closed_in_a_handler) == ["True True"]


def _forked(rank: int, group: Any) -> bool:
    with moecomm.Window(group, 64, **HOST) as window:
        calls = [
            window.barrier,
            window.check,
            lambda: window.local,
            lambda: window.wait(0, 0),
            lambda: window.signal(0, 0),
            lambda: window.handle,
        ]
        child = os.fork()
        if child == 0:
            try:
                for call in calls:
                    with pytest.raises(moecomm.Closed, match="before this process was forked"):
                        call()
                window.abort()  # disturbs nobody
                window.close()
            except BaseException:  # noqa: BLE001 - a child of a test must not go on with it
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        window.barrier()
        return os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_no_part_in_it(ranks: Ranks) -> None:
    assert ranks.run(2, _forked) == [True, True]
