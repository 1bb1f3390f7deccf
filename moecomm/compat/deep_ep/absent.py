"""Ranks that are lost before a window opens: the others open it all the same, with the shapes of all ranks.

The first rank that is there opens the windows of the lost ranks, too, each in a thread.  Then all mask these ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

from moecomm.buffer import Buffer
from moecomm.errors import Excluded, Mismatch, Unsupported
from moecomm.ranks.board import Board
from moecomm.ranks.group import Group
from moecomm.ranks.rendezvous import LocalRank, ProcessGroup

_LEAVE_S = 1.0  # for the store to answer a rank that leaves
_LOOK_S = 0.05


class Presence:
    """The ranks of a group that still come to open windows.  Making one is not collective, but alike on all ranks."""

    def __init__(self, ranks: Group, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._meetings = 0
        with closing(ranks.board()) as board:
            self._number = board.count(f"deep_ep/{ranks.rank}", 1)

    def leave(self) -> None:
        """Tell ranks that open windows later not to wait for this one."""
        with suppress(OSError, RuntimeError), closing(self._board(_LEAVE_S)) as board:
            board.write(f"left/{self._ranks.rank}", b"1")

    def meet(self, call: str) -> list[int]:
        """Return the ranks that have come, alike on all of them.  Collective; waits for all that have not left.

        Args:
            call: that the ranks make, alike on all of them.

        Raises:
            Excluded: the others did not wait for this rank any more.
            Mismatch: a rank makes another call; names both.
        """
        rank, ranks = self._ranks.rank, range(self._ranks.ranks)
        prefix, deadline = f"{self._meetings}/here", time.monotonic() + self._timeout_s
        self._meetings += 1
        with closing(self._board(self._timeout_s)) as board:
            board.write(f"{prefix}/{rank}", call.encode())
            while (decided := board.read([f"{prefix}/members"])) is None:
                come = [other for other in ranks if board.read([f"{prefix}/{other}"]) is not None]
                gone = [other for other in ranks if other not in come and board.read([f"left/{other}"]) is not None]
                if len(come) + len(gone) == len(ranks) or time.monotonic() > deadline:
                    decided = [board.decide(f"{prefix}/members", json.dumps(come).encode())]
                    break
                board.wait(_LOOK_S)
            members: list[int] = json.loads(decided[0])
            if rank not in members:
                raise Excluded(rank, tuple(members))
            calls = board.read([f"{prefix}/{other}" for other in members]) or []
        for other, theirs in zip(members, calls, strict=True):
            if theirs != call.encode():
                raise Mismatch("call", call, theirs.decode(errors="replace"), other)
        return members

    def open_without(self, members: list[int], open_one: Callable[[Any], Buffer]) -> Buffer:
        """Open a Buffer in which the ranks that are not `members` are masked.  Collective among these.

        `open_one`: opens the Buffer of a rank of the group.
        """
        absent = [other for other in range(self._ranks.ranks) if other not in members]
        stand_ins = absent if self._ranks.rank == members[0] else []
        with ThreadPoolExecutor(max(1, len(stand_ins))) as pool:
            opening = [pool.submit(open_one, self._as_rank(other)) for other in stand_ins]
            buffer = open_one(self._ranks)
            others = [future.result() for future in opening]
        buffer.mask(absent)
        for other in others:
            other.close()
        return buffer

    def _as_rank(self, rank: int) -> Any:
        if isinstance(self._ranks, LocalRank):
            return self._ranks.as_rank(rank)
        if not isinstance(self._ranks, ProcessGroup):
            raise Unsupported(f"ranks of {type(self._ranks).__name__} that are lost before their first call")
        return _ProcessGroup(self._ranks.process_group, rank)

    def _board(self, limit_s: float) -> Board:
        board = self._ranks.board(f"deep_ep/{self._number}/")
        board.limit_s = limit_s
        return board


class _ProcessGroup:
    """Process group in the view of another of its ranks."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return int(self._group.size())

    def get_group_store(self) -> Any:
        return self._group.get_group_store()
