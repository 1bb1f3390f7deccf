"""A rank that leaves may wait for the others, and never longer than it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moecomm import _native
from moecomm.backends import presence as presence_module
from moecomm.backends.presence import Presence
from moecomm.ranks.rendezvous import ProcessGroup

from ..conftest import Ranks
from ..fresh_python import beside_packages


def _leave(rank: int, group: Any, how: str, pidfds: bool) -> float:
    if not pidfds:  # an old kernel
        presence_module.pidfd = lambda pid: None  # in this process alone
    control = _native.host_alloc(64)
    presence = Presence(ProcessGroup(group), control.address, 20)
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(0.3 if how == "leaves" else 60)
    begin = time.monotonic()
    presence.leave(0.6 if how == "stays" else 20.0)
    return time.monotonic() - begin


@pytest.mark.parametrize("pidfds", [True, False])
@pytest.mark.parametrize("how", ["leaves", "dies", "stays"])
def test_lingering_ends(ranks: Ranks, how: str, pidfds: bool) -> None:
    ranks.start(2, _leave, how, pidfds)
    found = ranks.results(2 if how == "leaves" else 1)
    assert found[0] < 15 and (how != "stays" or found[0] >= 0.6)
    assert how != "leaves" or found[0] >= 0.2, "it waited for rank 1"


UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def start_in_namespaces(store: Path) -> list[subprocess.Popen[str]]:
    """Rank 0 here, ranks 1 and 2 each in a PID namespace of its own, where both have the pid 1."""
    program = Path(__file__).with_name("namespaced_rank.py")
    return [
        subprocess.Popen(
            [*(UNSHARE if rank else []), sys.executable, program, store, str(rank), "3"],
            stdout=subprocess.PIPE,
            text=True,
            **beside_packages(),
        )
        for rank in range(3)
    ]


@pytest.mark.long
def test_ranks_in_several_pid_namespaces(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to make PID namespaces (unshare --pid)")
    processes = start_in_namespaces(tmp_path / "store")
    try:
        said = [process.communicate(timeout=240)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert said[1][0] == "1", "it has a namespace"
    assert [words[1:] for words in said[:2]] == [["20", "2", "True"]] * 2
    assert said[2] == []
