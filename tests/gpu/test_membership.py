"""GPU ranks that are stopped (SIGSTOP) and go on, and NIXL's published plan.  Ranks share GPUs where there are few."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moecomm
from moecomm.base.experts import experts_of

from ..compat.test_nixl_ep import follow_the_plan
from ..conftest import Ranks
from ..core.test_masking import is_stopped
from ..core.test_membership import failure_of
from .kills import EXACT, SIZES, exact_round, sums_of, tokens_of

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(200)]
RANKS, STOPPED = 3, 1


class Member:
    """A rank, on the GPU of its number or one that it shares."""

    def __init__(self, rank: int, group: Any, timeout_s: float, **options: Any) -> None:
        self.buffer = moecomm.Buffer(group, **SIZES, timeout_s=timeout_s, **options)
        self._given = tokens_of(rank, self.buffer.device)
        self.rounds(3)

    def rounds(self, count: int, without: range = range(0)) -> None:
        """Make rounds that are exact, without some experts."""
        want = sums_of(self._given, without)
        for _ in range(count):
            exact_round(self.buffer, self._given, want)


def paused(rank: int, group: Any, pids: Any) -> bool:
    """Rank 1 stops between two rounds; the others mask it, and take it in again when it goes on."""
    member = Member(rank, group, 20)
    buffer = member.buffer
    if rank == STOPPED:
        pids[rank] = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(moecomm.Excluded):
            member.rounds(1)
    else:
        while not is_stopped(pids[STOPPED]):
            time.sleep(1e-3)
        buffer.mask([STOPPED])
        lost = experts_of(STOPPED, SIZES["num_experts"], RANKS)
        member.rounds(EXACT, lost)
        os.kill(pids[STOPPED], signal.SIGCONT)
        member.rounds(EXACT, lost)
    assert buffer.unmask([STOPPED]) == ()
    member.rounds(EXACT)
    buffer.close()
    return True


def test_a_rank_that_was_paused_is_taken_in_again(gpu_ranks: Ranks) -> None:
    pids = gpu_ranks._context.Array("i", RANKS)
    assert gpu_ranks.run(RANKS, paused, pids) == [True] * RANKS


def stopped(rank: int, group: Any, pids: Any, after_s: float) -> tuple[str, tuple[int, ...]]:
    """Rank 1 is stopped at any moment, for longer than the deadline; the others go on without it."""
    with Member(rank, group, 60).buffer as first:  # compiles, which takes longer than the deadline
        if rank == 0:
            first.compile_for(RANKS - 1)
        dist.barrier(group)
    member = Member(rank, group, 3)
    buffer = member.buffer
    pids[rank] = os.getpid()
    if rank == 0:
        threading.Timer(after_s, lambda: os.kill(pids[STOPPED], signal.SIGSTOP)).start()
    error = failure_of(lambda: member.rounds(1))
    if rank == STOPPED:
        with pytest.raises(moecomm.Excluded) as excluded:
            buffer.shrink()
        return type(error).__name__, excluded.value.ranks
    lost = buffer.shrink().lost
    member.rounds(EXACT)
    if rank == 0:
        os.kill(pids[STOPPED], signal.SIGCONT)  # it may write to the old windows from now on
    member.rounds(10 * EXACT)
    buffer.close()
    return type(error).__name__, lost


@pytest.mark.parametrize("after_ms", [0.5, 7.0, 23.0])
def test_a_stopped_rank_is_left_out_and_harms_no_round(gpu_ranks: Ranks, after_ms: float) -> None:
    pids = gpu_ranks._context.Array("i", RANKS)
    found = gpu_ranks.run(RANKS, stopped, pids, after_ms / 1e3)
    assert found[0] == found[2] == ("Timeout", (STOPPED,))
    assert found[STOPPED][1] == (0, 2)


def masked(rank: int, group: Any, pids: Any) -> bool:
    """Rank 1 is stopped for longer than the deadline: the others mask it in the dispatch that waits for it."""
    with Member(rank, group, 60).buffer:  # compiles, which takes longer than the deadline
        dist.barrier(group)
    member = Member(rank, group, 3, on_timeout="mask")
    if rank == STOPPED:
        pids[rank] = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(moecomm.Excluded):
            member.rounds(1)
        pids[rank] = 0
        return True
    while not (stopped := pids[STOPPED]) or not is_stopped(stopped):
        time.sleep(1e-3)
    lost = experts_of(STOPPED, SIZES["num_experts"], RANKS)
    member.rounds(EXACT, lost)
    assert member.buffer.masked == (STOPPED,)
    if rank == 0:
        os.kill(stopped, signal.SIGCONT)
    member.rounds(EXACT, lost)
    while pids[STOPPED]:  # it looks at the windows of the others
        time.sleep(1e-3)
    member.buffer.close()
    return True


def test_a_wait_that_runs_out_masks_a_stopped_rank(gpu_ranks: Ranks) -> None:
    pids = gpu_ranks._context.Array("i", RANKS)
    assert gpu_ranks.run(RANKS, masked, pids) == [True] * RANKS


def test_the_published_plan(gpu_ranks: Ranks, tmp_path: Path) -> None:
    follow_the_plan(gpu_ranks, tmp_path, "cuda")
