"""Workspaces over Windows of a caller, several at once, and what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import overlap

from ..backends.conftest import run_ranks
from .cases import HOST, on_ranks, random_case, same


def test_a_window_that_has_been_used_will_do() -> None:
    case = random_case("all_gather_matmul", 3, 4)

    def run(group: Any) -> bool:
        with moecomm.Window(group, 1 << 16, signals=1, **HOST) as window:
            window.local.fill_(255)
            for rank in range(window.num_ranks):
                window.signal(rank, 0, 7)
            with overlap.Workspace(window) as workspace:
                found = [same(case.run(workspace), case.want()[group.rank], case.dtype) for _ in range(3)]
            with pytest.raises(moecomm.Closed):
                case.run(workspace)
            window.barrier()  # it is still open
            with overlap.Workspace(window) as again:
                found.append(same(case.run(again), case.want()[group.rank], case.dtype))
            return all(found)

    assert run_ranks(3, run) == [True] * 3


def test_a_window_has_options_of_its_own() -> None:
    with moecomm.Window("self", 1 << 16, **HOST) as window:
        for given in ({"nbytes": 4096}, {"backend": "host"}, {"device": "cpu"}):
            with pytest.raises(moecomm.BadInput, match="group: got a Window"):
                overlap.Workspace(window, **given)  # type: ignore[arg-type]
        window.barrier()


def test_workspaces_do_not_disturb_each_other() -> None:
    cases = [random_case("matmul_reduce_scatter", 2, seed) for seed in range(6)]

    def run(group: Any) -> bool:
        with overlap.Workspace(group, 1 << 16, **HOST) as one, overlap.Workspace(group, 1 << 16, **HOST) as two:
            found = [case.run((one, two)[number % 2]) for number, case in enumerate(cases)]
        return all(same(got, c.want()[group.rank], c.dtype) for got, c in zip(found, cases, strict=True))

    assert run_ranks(2, run) == [True, True]


def test_what_a_workspace_says_of_itself() -> None:
    def body(workspace: overlap.Workspace) -> None:
        assert (workspace.num_ranks, workspace.device, workspace.closed) == (2, torch.device("cpu"), False)
        assert "Workspace open" in repr(workspace) and f"rank {workspace.rank} of 2" in repr(workspace)
        workspace.check()

    on_ranks(2, body)
