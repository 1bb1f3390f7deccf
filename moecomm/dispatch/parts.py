"""Tokens in parts: what becomes of a call whose rows have no room where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from moecomm.errors import TooManyRows

_Result = TypeVar("_Result")


def in_parts(tokens: int, max_tokens: int, one: Callable[[slice], _Result]) -> Iterator[tuple[slice, _Result]]:
    """Do a call for parts of the tokens, in order, and yield what it returns for each.

    All ranks see the same error when a rank has too little room.  So they split their tokens alike, by index, and split
    a part again that is still too large.

    Args:
        tokens: of this rank.
        max_tokens: the most that a rank has.
        one: does the call for some tokens.  It waits for their rows and raises the error of its own round.  On GPUs a
            call that does not wait leaves its error to the next one, and the wrong part would be split.

    Raises:
        TooManyRows: there is no room for one token of each rank.
    """
    waiting = [(1, 2), (0, 2)]  # (i, n): the i-th of n parts; the next is the last
    while waiting:
        part, parts = waiting.pop()
        span = slice(tokens * part // parts, tokens * (part + 1) // parts)
        try:
            done = one(span)
        except TooManyRows:
            if parts > max_tokens:
                raise
            waiting += [(2 * part + 1, 2 * parts), (2 * part, 2 * parts)]
            continue
        yield span, done
        del done  # frees its memory for the next
