"""Calls whose `group` is no group: the caller can't know which ranks wait for it, so it says so to the whole job.

A process that makes such a call leaves a notice at the default group.  A rank that waits for that process takes the
notice down and fails the opening.  A process whose next call is good takes its own notice down; it looks for none in
that call, because the others may have made the same bad call, and be slower.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from moecomm.board import StoreBoard
from moecomm.errors import BadInput

# For the store to answer.  Without a notice peers wait for their deadline, so a busy store has time to take it; a rank
# that looks for notices has a deadline of its own.
_LEAVE_S, _LOOK_S = 2.0, 0.5
_INTERVAL_S = 0.05
_TAKEN = b"taken by "
_lock = threading.Lock()
_made = 0  # such calls of this process
_notice = b""  # the one of its last call, if that was bad


def announce(error: BadInput) -> None:
    """Leaves a notice of a call with a bad group."""
    global _made, _notice
    with _lock:
        _made += 1
        _notice = json.dumps({"number": _made, "got": str(error.got), "want": str(error.want)}).encode()
    with suppress(OSError, RuntimeError), _notices(_LEAVE_S) as board:
        board.write(str(_own_rank()), _notice)


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
                if found is None or found[0].startswith(_TAKEN):
                    continue
                if _take(board, process, found[0]):
                    return rank, json.loads(found[0])
        return None


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
    return board.replace(str(process), notice, _TAKEN + b"%d %s" % (_own_rank(), notice))
