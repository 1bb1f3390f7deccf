"""Last calls: the membership call, or the opening, that each rank of a group has made last.

Ranks write them to a board for the texts of errors: a Timeout of a rank that waits for a peer in another call names
both calls.  No rank decides anything by them, so a board that fails is passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from typing import NamedTuple

from moecomm.errors import MoecommError
from moecomm.ranks import messages
from moecomm.ranks.board import Board, Part
from moecomm.ranks.group import Group, Members
from moecomm.ranks.messages import LastCall
from moecomm.ranks.session import Session

_LIMIT_S = 0.25  # for a board to answer
_RECENT_S = 60.0  # a call that ended so long ago says nothing any more
_SHOWN = 4  # ranks that a text names

# Errors of boards: a store that is stopped, gone, or fails, and pages that are full.
_FAILURES = (MoecommError, OSError, RuntimeError)


class Ranks(NamedTuple):
    """The ranks of an open Buffer."""

    session: Session
    members: Members
    masked: frozenset[int]


def others(ranks: Ranks, *, in_rounds: bool = True) -> str:
    """Return where the other ranks are, as the end of the text of an error: those that are known to be elsewhere.

    `in_rounds`: also those that have begun the next round.
    """
    found = _elsewhere(ranks, in_rounds)
    return _excluded(ranks) or _shown(found)  # ranks that mask this one remove their notes afterwards


def others_over(group: Group, opened: Iterable[Ranks]) -> str:
    """Return where the other ranks of a group are, as others(), for an opening: also in Buffers that are open."""
    found: dict[int, str] = {}
    for ranks in opened:
        if _key(ranks.members.group) == _key(group):
            found |= _elsewhere(ranks, in_rounds=True)
            if where := _excluded(ranks):
                return where
    return _shown(found | _read(group.board, [rank for rank in range(group.ranks) if rank != group.rank], _RECENT_S))


def noted_beside(ranks: Ranks, call: str) -> AbstractContextManager[None]:
    """Leave a note of an agreement of a Buffer; see noted()."""
    return noted(partial(_board, ranks), ranks.session.context.rank, call, keep=call.startswith("shrink"))


@contextmanager
def noted(make: Callable[[], Board], rank: int, call: str, *, keep: bool = False) -> Iterator[None]:
    """Leave a note of a call on a board while the block runs, and if it fails also afterwards.

    Args:
        make: makes the board.
        rank: this one, in the numbers of that board's ranks.
        call: with its parentheses.
        keep: also if the block succeeds, because that leaves ranks behind.
    """
    _note(make, rank, LastCall(call, 0.0, False))
    try:
        yield
    except BaseException:
        _note(make, rank, LastCall(call, time.time(), True))
        raise
    _note(make, rank, LastCall(call, time.time(), False) if keep else None)


def _note(make: Callable[[], Board], rank: int, last: LastCall | None) -> None:
    with suppress(*_FAILURES), closing(make()) as board:
        board.limit_s = _LIMIT_S
        if last is None:
            board.erase([f"last/{rank}"])
        else:
            board.write(f"last/{rank}", messages.pack(last))


def _excluded(ranks: Ranks) -> str:
    with suppress(RuntimeError):  # the device does not answer
        if ranks.session.excluded():
            return "; the other ranks have masked this one meanwhile"
    return ""


def _elsewhere(ranks: Ranks, in_rounds: bool) -> dict[int, str]:
    context, members = ranks.session.context, ranks.members
    waited = [rank for rank in range(context.shape.ranks) if rank != context.rank and rank not in ranks.masked]
    found: dict[int, str] = {}
    if in_rounds:
        with suppress(RuntimeError):  # the device does not answer
            begun = {rank: op for rank, op in enumerate(ranks.session.begun()) if op and rank in waited}
            found = {rank: "has closed this Buffer" if op == "close" else f"is in {op}()" for rank, op in begun.items()}
    recent_s = max(_RECENT_S, 2 * members.timeout_s)
    if ranks.session.pages is not None:
        found |= _read(members.group.board, waited, recent_s)
    return found | _read(partial(_board, ranks), waited, recent_s)


def _board(ranks: Ranks) -> Board:
    """Make the board on which ranks of a Buffer leave notes of its calls."""
    pages = ranks.session.pages
    return ranks.members.group.board() if pages is None else Part(pages, "")


def _read(make: Callable[[], Board], ranks: Sequence[int], recent_s: float) -> dict[int, str]:
    """Return, by rank, what these ranks are in, as a predicate.

    A call that ended longer than `recent_s` seconds ago is none of these.
    """
    found: dict[int, str] = {}
    with suppress(*_FAILURES), closing(make()) as board:
        board.limit_s = _LIMIT_S
        for rank, there in zip(ranks, board.look([f"last/{rank}" for rank in ranks]), strict=True):
            if there is None:
                continue
            last: LastCall = messages.unpack(there, LastCall)
            if last.left_at == 0:
                found[rank] = f"is in {last.call}"
            elif time.time() - last.left_at < recent_s:
                found[rank] = f"has called {last.call}, which has {'failed' if last.failed else 'ended'} there"
    return found


def _shown(found: dict[int, str]) -> str:
    """Return the calls that ranks are in, as the end of a text."""
    there = [f"rank {rank} {what}" for rank, what in sorted(found.items())]
    more = [f"and {len(there) - _SHOWN} others are elsewhere, too"] if len(there) > _SHOWN else []
    return "".join(f"; {one}" for one in [*there[:_SHOWN], *more])


def _key(group: Group) -> object:
    return getattr(group, "process_group", group)
