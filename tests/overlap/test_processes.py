"""Ranks that are processes: values, killed ranks, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import overlap

from ..conftest import Ranks
from ..live import ROOM_S
from .cases import HOST, OPERATORS, random_case, same


def _values(rank: int, group: Any) -> list[str]:
    wrong = []
    with overlap.Workspace(group, 1 << 20, **HOST) as workspace:
        for seed in range(30):
            case = random_case(OPERATORS[seed % 5], group.size(), seed)
            if not same(case.run(workspace), case.want()[rank], case.dtype):
                wrong.append(f"{case.operator}, seed {seed}")
    return wrong


@pytest.mark.parametrize("count", [1, 2, 4])
def test_calls_of_processes_have_the_bits_of_the_reference(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, _values) == [[]] * count


def _until_a_rank_dies(rank: int, group: Any, operator: str, backward: bool) -> Any:
    workspace = overlap.Workspace(group, 1 << 20, **HOST)
    case = random_case(operator, group.size(), 4)
    name = "tables" if operator == "embedding_all_to_all" else "x"
    leaf = case.given[rank][name].requires_grad_()
    started = time.monotonic()
    try:
        for call in range(100):  # rank 1 has done its part of the call after which it ends, but of no backward pass
            out = case.run(workspace)
            if rank == 1 and call == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if backward:
                torch.autograd.grad(out.sum(), leaf)
    except moecomm.PeerLost as error:
        workspace.close()
        return error.peer, error.rank, time.monotonic() - started
    return None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_survivors_name_a_killed_rank(ranks: Ranks, operator: str, backward: bool) -> None:
    ranks.start(3, _until_a_rank_dies, operator, backward)
    found = ranks.results(2)
    assert sorted(found) == [0, 2]
    for rank, (peer, noticed_by, seconds) in found.items():
        assert (peer, noticed_by) == (1, rank) and seconds < ROOM_S, found


def _interrupted(rank: int, group: Any) -> str:
    with overlap.Workspace(group, 4096, **HOST) as workspace:
        x, w = (torch.ones(2, 3, dtype=torch.bfloat16) for _ in range(2))
        overlap.matmul_all_reduce(x, w, workspace)
        if rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        elif rank == 2:
            try:
                workspace.window.wait(workspace.window.num_signals - 1, 1)  # of which nobody raises any
            except moecomm.Aborted as error:
                return f"aborted by {error.peer}"
        try:
            overlap.matmul_all_reduce(x, w, workspace)
        except KeyboardInterrupt:
            return "interrupted"
        except moecomm.Aborted as error:
            return f"aborted by {error.peer}"
    return "not ended"


def test_an_interrupt_ends_the_calls_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(3, _interrupted) == ["interrupted", "aborted by 0", "aborted by 0"]


def _forked(rank: int, group: Any) -> bool:
    with overlap.Workspace(group, 4096, **HOST) as workspace:
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        child = os.fork()
        if child == 0:
            try:
                overlap.matmul_all_reduce(x, x, workspace)
            except moecomm.Closed:
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        overlap.matmul_all_reduce(x, x, workspace)
        return os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_no_part_in_it(ranks: Ranks) -> None:
    assert ranks.run(2, _forked) == [True, True]
