"""Ranks as processes: results by rank, failures by name, the cause before its consequences."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.tools.launch import RanksFailed, launch


def add_up(group: dist.ProcessGroup, base: int) -> list[int]:
    total = torch.tensor([base + group.rank()])
    dist.all_reduce(total, group=group)
    return [group.rank(), group.size(), int(total)]


def open_buffer(group: dist.ProcessGroup, **given: Any) -> moecomm.Buffer:
    return moecomm.Buffer(
        group,
        **{"hidden": 64, "num_experts": 6, "topk": 2, "max_tokens": 8, "backend": "host", "timeout_s": 20.0, **given},
    )


def fail_in_a_round(group: dist.ProcessGroup, how: str) -> None:
    """Rank 1 fails, each time differently, while the others are in a round with it."""
    with open_buffer(group) as buffer:
        if group.rank() == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank() == 1 and how == "raised":
            raise LookupError("no such expert")
        topk_idx = torch.full((8, 2), 9 if group.rank() == 1 and how == "bad id" else 0)
        buffer.dispatch(torch.zeros(8, 64, dtype=torch.bfloat16), topk_idx)


def disagree(group: dist.ProcessGroup) -> None:
    open_buffer(group, topk=1 + group.rank() // 2)


def listening(group: dist.ProcessGroup) -> list[list[str]]:
    """Addresses at which this rank's process and its parent accept connections, as /proc/net/tcp has them."""
    dist.barrier(group)
    found = []
    for process in (os.getpid(), os.getppid()):
        sockets = set()
        for fd in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                sockets.add(os.readlink(f"/proc/{process}/fd/{fd}"))
        tables = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table.splitlines()]
        listeners = [
            words[1].split(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets
        ]
        found.append(sorted(listeners))
    dist.barrier(group)
    return found


@pytest.mark.long
def test_nobody_listens_to_other_machines_or_users() -> None:
    loopback = "0100007F"
    for own, parent in launch(f"{__name__}:listening", {}, 2):
        assert own and set(own) == {loopback}, "gloo's own, between the ranks"
        assert parent == []


def test_results_come_back_by_rank() -> None:
    assert launch(f"{__name__}:add_up", {"base": 10}, 3) == [[0, 3, 33], [1, 3, 33], [2, 3, 33]]


def test_a_killed_rank_is_the_cause_and_the_others_say_who_was_lost() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(f"{__name__}:fail_in_a_round", {"how": "killed"}, 3)
    first, *others = caught.value.failures
    assert (first.rank, first.error, first.text) == (1, "ProcessEnded", "the process was killed by SIGKILL")
    assert [(f.rank, f.error) for f in others] == [(0, "PeerLost"), (2, "PeerLost")]
    assert all("rank 1 is gone" in f.text for f in others)


@pytest.mark.long
def test_an_exception_is_named_and_its_consequences_come_after(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(f"{__name__}:fail_in_a_round", {"how": "raised"}, 3)
    first, *others = caught.value.failures
    assert str(first) == "rank 1: LookupError: no such expert"
    assert {f.error for f in others} == {"PeerLost"} and {f.rank for f in others} == {0, 2}
    assert "fail_in_a_round" in capfd.readouterr().err  # the traceback of what is not moecomm's


@pytest.mark.long
def test_bad_input_of_one_rank_is_told_by_all() -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(f"{__name__}:fail_in_a_round", {"how": "bad id"}, 3)
    assert [f.error for f in caught.value.failures] == ["BadInput"] * 3
    assert all("expert 9" in f.text and "rank 1" in f.text for f in caught.value.failures)


@pytest.mark.long
def test_a_mismatch_at_open_names_the_field() -> None:
    with pytest.raises(RanksFailed, match="topk: this rank has 1, rank 2 has 2"):
        launch(f"{__name__}:disagree", {}, 3)


def work_on(group: dist.ProcessGroup, without: list[int]) -> int:
    if group.rank() not in without:
        threading.Event().wait()
    return group.rank()


@pytest.mark.parametrize(("without", "late", "limit_s"), [([], [0, 1, 2], 2.5), ([0, 2], [1], 9.5)])
@pytest.mark.long
def test_ranks_that_do_not_end_in_time_are_named_and_ended(without: list[int], late: list[int], limit_s: float) -> None:
    """Where some are to end they get the time to start."""
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        launch(f"{__name__}:work_on", {"without": without}, 3, limit_s)
    assert [(f.rank, f.error, f.text) for f in caught.value.failures] == [
        (rank, "Timeout", f"had not ended after {limit_s} s") for rank in late
    ]
    assert limit_s <= time.monotonic() - begin < 30
    assert launch(f"{__name__}:work_on", {"without": [0, 1, 2]}, 3, 60.0) == [0, 1, 2]
