"""Messages: the typed values that ranks leave each other on a board, in one format.

A message is a NamedTuple of whole numbers, words, flags, lists of numbers and tables.  Its name travels with it, and a
reader says which kinds it takes.  So a rank that made another call is found by the name of its message.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from moecomm.base.choices import ReplicaChoice
from moecomm.errors import Unsupported

_Kind = TypeVar("_Kind", bound=tuple[Any, ...])
_SHOWN = 80  # bytes of what is no message


class LastCall(NamedTuple):
    """The last membership call of a rank, or the last opening over its group.

    Attributes:
        call: its name, with parentheses.
        left_at: when the rank left it, in seconds since the epoch; 0: it is under way.
        failed: by an error.
    """

    call: str
    left_at: float
    failed: bool


class Coming(NamedTuple):
    """A rank's part in an agreement on who goes on.

    Attributes:
        call: that this rank makes.
        round: the last that has ended here; shrink(): 0.
        failed: number of the call that has failed and could be repeated, since the last agreement; 0: none.
        suspects: ranks that are left out unless they come.
        named: ranks that are left out.
        joining: ranks that are taken in again.
    """

    call: str
    round: int
    failed: int
    suspects: list[int]
    named: list[int]
    joining: list[int]


class Decision(NamedTuple):
    """An agreement that stands.

    Attributes:
        call: of the ranks that have agreed.
        members: ranks that take part.
        round: after which they go on.
        repeats: all have failed in the same call, which they make again.
    """

    call: str
    members: list[int]
    round: int
    repeats: bool

    @property
    def masks(self) -> bool:
        """Return whether the ranks go on in the same windows, and may take in others."""
        return not self.call.startswith("shrink")


class Disagreement(NamedTuple):
    """An agreement that has failed, because two ranks made different calls."""

    ranks: list[int]
    first: str
    second: str


class Lost(NamedTuple):
    """The ranks that were lost before all had begun anew after a Decision.  If there are any, ranks agree again."""

    ranks: list[int]


class Placed(NamedTuple):
    """The placement of a rank that stays, where ranks have made different numbers of changes.

    Attributes:
        experts: by rank those of its slots, in the oldest placement; none: another rank tells.
        choice: of replicas.
        replaced: slots of this rank that may no longer have the weights of that placement.
    """

    experts: list[list[int]]
    choice: ReplicaChoice
    replaced: list[int]


class Agreed(NamedTuple):
    """The number of the last agreement on masks that a rank has ended."""

    number: int


class Opened(NamedTuple):
    """The outcome of an opening that has succeeded."""


class Failed(NamedTuple):
    """The outcome of an opening that has failed.

    Attributes:
        kind: name of the class of the error.
        rank: the rank that announced it.
        text: of the error.
        fields: its attributes.
        absent: ranks that had not come and never hear of it: others have waited for them in vain, or they have raised
            the error themselves.
    """

    kind: str
    rank: int
    text: str
    fields: dict[str, Any]
    absent: list[int]


class Stray(NamedTuple):
    """A call whose `group` is no group.  `id`: of the call."""

    id: str
    got: str
    want: str


def pack(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes; see unpack()."""
    return json.dumps([type(message).__name__, *message]).encode()


def unpack(data: bytes, *kinds: type[_Kind]) -> _Kind:
    """Return the message that pack() has packed, of one of these kinds.

    Raises:
        Unsupported: it is of another kind, or no message of this version of moecomm.
    """
    for kind in kinds:
        with suppress(ValueError, RecursionError):
            _, *fields = _decoder(kind).decode(data)
            return kind(*fields)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise Unsupported(
        f"another rank has left {data[:_SHOWN]!r}, which is no {wanted} of this version of moecomm; do all ranks run "
        "the same version?"
    )


@functools.cache
def _decoder(kind: type) -> msgspec.json.Decoder[tuple[Any, ...]]:
    """Return the reader of the messages of a kind: a list of its name and its fields."""
    name: Any = Literal[kind.__name__]
    return msgspec.json.Decoder(tuple.__class_getitem__((name, *get_type_hints(kind).values())))
