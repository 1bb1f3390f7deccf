"""Calls whose `group` is no group: the caller can't know which ranks wait for it, so it says so to the whole job.

A process that makes such a call leaves a notice at the default group.  A rank that waits for that process takes the
notice down and fails the opening.  A process whose next call is good takes its own notice down; it looks for none in
that call, because the others may have made the same bad call, and be slower.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from moecomm.core.board import StoreBoard
from moecomm.errors import BadInput

# For the store to answer.  Without a notice peers wait for their deadline, so a busy store has time to take it; a rank
# that looks for notices has a deadline of its own.
_LEAVE_S, _LOOK_S = 2.0, 0.5
_INTERVAL_S = 0.05
_TAKEN = b"taken by "
_lock = threading.Lock()
_notice = b""  # the one of this process's last call, if that was bad
_found: dict[int, str] = {}  # by process: the id of its last notice that has ended an opening here


def announce(error: BadInput) -> None:
    """Leaves a notice of a call with a bad group, if there is a default group."""
    global _notice
    notice = json.dumps({"id": uuid.uuid4().hex, "got": str(error.got), "want": str(error.want)}).encode()
    with suppress(OSError, RuntimeError), _notices(_LEAVE_S) as board:
        with _lock:
            _notice = notice  # from here on: the store may take it later than we wait
        board.write(str(_own_rank()), notice)


def withdraw() -> bool:
    """Takes our own notice down, if nobody has: this process makes a good call.  Returns whether its last was bad."""
    global _notice
    with _lock:
        last, _notice = _notice, b""
    if last:
        with suppress(OSError, RuntimeError), _notices(_LEAVE_S) as board:
            _take(board, _own_rank(), last)
    return bool(last)


class Lookout:
    """Looks for notices of ranks that an opening waits for.  `global_ranks`: of its ranks, empty: unknown."""

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self._global_ranks = global_ranks
        self._next = time.monotonic() + _INTERVAL_S

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return bool(self._global_ranks) and time.monotonic() >= self._next

    def find(self, missing: Sequence[int]) -> tuple[int, dict[str, Any]] | None:
        """A missing rank that has left a notice, which is taken down, and what it says."""
        self._next = time.monotonic() + _INTERVAL_S
        with suppress(OSError, RuntimeError), _notices(_LOOK_S) as board:
            for rank in missing:
                process = self._global_ranks[rank]
                found = board.read([str(process)])
                if found is not None and (said := _claimed(board, process, found[0])) is not None:
                    return rank, said
        return None


def _claimed(board: StoreBoard, process: int, found: bytes) -> dict[str, Any] | None:
    """What a notice says if it is ours to act on.  It may have been taken down for us by a call whose answer came too
    late.
    """
    for_us = _taken(b"")
    if found.startswith(for_us):
        said: dict[str, Any] = json.loads(found[len(for_us) :])
    elif found.startswith(_TAKEN) or not _take(board, process, found):
        return None
    else:
        said = json.loads(found)
    with _lock:
        is_new, _found[process] = _found.get(process) != said["id"], said["id"]
    return said if is_new else None


@contextmanager
def _notices(limit_s: float) -> Iterator[StoreBoard]:
    """The board of notices.  Raises OSError or RuntimeError where there is no default group, or its store fails."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("no default process group")
    assert dist.group.WORLD is not None
    board = StoreBoard(dist.group.WORLD.get_group_store(), "moecomm/strays/")
    board.limit_s = limit_s
    try:
        yield board
    finally:
        board.close()


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _take(board: StoreBoard, process: int, notice: bytes) -> bool:
    """Takes down a notice of that process; False: somebody else has."""
    return board.replace(str(process), notice, _taken(notice))


def _taken(notice: bytes) -> bytes:
    return _TAKEN + b"%d %s" % (_own_rank(), notice)
