"""Stray calls: calls whose `group` is no group.

The caller can't know which ranks wait for it, so it tells the whole job: it leaves a note in the store of the default
group.  A rank that waits for that process removes the note and fails the opening.  A process whose next call is good
removes its own note; it looks for none in that call, because peers may have made the same bad call, and be slower.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from moecomm.errors import BadInput
from moecomm.ranks import messages
from moecomm.ranks.board import StoreBoard
from moecomm.ranks.messages import Stray

# For the store to answer.  Without a note peers wait for their deadline, so a busy store has time to take it; a rank
# that looks for notes has a deadline of its own.
_LEAVE_S, _LOOK_S = 2.0, 0.5
_INTERVAL_S = 0.05
_TAKEN = b"taken by "
_lock = threading.Lock()
_notice = b""  # of this process's last call, if that was bad
_found: dict[int, str] = {}  # by process: the id of its last note that has ended an opening here


def announce(error: BadInput) -> None:
    """Leave a note of a call with a bad group, if there is a default group."""
    global _notice
    notice = messages.pack(Stray(uuid.uuid4().hex, str(error.got), str(error.want)))
    with suppress(OSError, RuntimeError), _notices(_LEAVE_S) as board:
        with _lock:
            _notice = notice  # from here on: the store may take it later than we wait
        board.write(str(_own_rank()), notice)


def withdraw() -> bool:
    """Remove this process's own note, if no peer has: this call is good.  Return whether the last call was bad."""
    global _notice
    with _lock:
        last, _notice = _notice, b""
    if last:
        with suppress(OSError, RuntimeError), _notices(_LEAVE_S) as board:
            _take(board, _own_rank(), last)
    return bool(last)


class Lookout:
    """Look for notes of the ranks that an opening waits for.  `global_ranks`: of its ranks; empty: unknown."""

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self._global_ranks = global_ranks
        self._next = time.monotonic() + _INTERVAL_S

    def is_due(self) -> bool:
        """Return whether it is time to look."""
        return bool(self._global_ranks) and time.monotonic() >= self._next

    def find(self, missing: Sequence[int]) -> tuple[int, Stray] | None:
        """Return a missing rank that has left a note, and the note, which is removed."""
        self._next = time.monotonic() + _INTERVAL_S
        with suppress(OSError, RuntimeError), _notices(_LOOK_S) as board:
            for rank in missing:
                process = self._global_ranks[rank]
                found = board.read([str(process)])
                if found is not None and (said := _claimed(board, process, found[0])) is not None:
                    return rank, said
        return None


def _claimed(board: StoreBoard, process: int, found: bytes) -> Stray | None:
    """Return a note if this rank may act on it.  An earlier call of ours may have removed it and answered too late."""
    for_us = _taken(b"")
    if found.startswith(for_us):
        said = messages.unpack(found[len(for_us) :], Stray)
    elif found.startswith(_TAKEN) or not _take(board, process, found):
        return None
    else:
        said = messages.unpack(found, Stray)
    with _lock:
        is_new, _found[process] = _found.get(process) != said.id, said.id
    return said if is_new else None


@contextmanager
def _notices(limit_s: float) -> Iterator[StoreBoard]:
    """The board of notes.  Raises OSError or RuntimeError where there is no default group, or its store fails."""
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
    """Remove the note of that process; False: another rank has."""
    return board.replace(str(process), notice, _taken(notice))


def _taken(notice: bytes) -> bytes:
    return _TAKEN + b"%d %s" % (_own_rank(), notice)
