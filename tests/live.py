"""Processes that a test sees from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moecomm import Buffer, Window


def children_of(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Waits that end at once are compared with a deadline that is far: other programs may have the cores meanwhile.
FAR_S, ROOM_S = 240.0, 60.0


def shorten(opened: Buffer | Window, timeout_s: float) -> None:
    """Let waits be no longer than this, of calls that are made with options for the first time; opening had room."""
    of = opened.rounds.session.context if isinstance(opened, Buffer) else opened._opened.handle
    of.timeout_ns = round(timeout_s * 1e9)


def wait_until(condition: Callable[[], bool], timeout_s: float = ROOM_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
