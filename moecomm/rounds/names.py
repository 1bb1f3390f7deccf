"""Names of the Buffers of this process, for operators, whose arguments are tensors, numbers and strings."""

from __future__ import annotations

import itertools

from moecomm.base.weak import WeakTable
from moecomm.errors import BadInput, Closed
from moecomm.ranks.last_calls import Ranks
from moecomm.rounds.rounds import Rounds

_PREFIX = "moecomm_buffer_"
_numbers = itertools.count()
_named: WeakTable[str, Rounds] = WeakTable()


def give(rounds: Rounds) -> str:
    """Register the rounds of a Buffer under a name that is never used again in this process."""
    name = f"{_PREFIX}{next(_numbers)}"
    _named.add(name, rounds)
    return name


def find(name: str) -> Rounds:
    """Return the rounds of the Buffer of that name.

    Raises:
        Closed: the Buffer has been closed, or is gone.
        BadInput: no Buffer's name.
    """
    rounds = _named.get(name)
    if rounds is None:
        if not name.startswith(_PREFIX):
            raise BadInput("buffer", repr(name), "the .name of a Buffer of this process")
        raise Closed()
    if not rounds._open:
        rounds.require_open()  # says so
    return rounds


def opened() -> list[Rounds]:
    """Return the rounds of all open Buffers of this process."""
    return [rounds for rounds in _named.values() if not rounds.closed]


def ranks() -> list[Ranks]:
    """Return the ranks of each open Buffer of this process."""
    return [rounds.ranks for rounds in opened()]


def get(name: str) -> Rounds | None:
    """Return the rounds of the Buffer of that name, open or closed; None if it is gone."""
    return _named.get(name)
