"""The ranks of a Buffer, as the code that opens one sees them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from moecomm.ranks.board import Board


class Rendezvous(Protocol):
    """The ranks of one Buffer.  `in_process`: all ranks are threads of this process."""

    rank: int
    ranks: int
    in_process: bool

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank.  All ranks must pass the same number of bytes."""
        ...


@runtime_checkable
class Group(Rendezvous, Protocol):
    """A Rendezvous over which Buffers open."""

    def board(self, prefix: str = "") -> Board:
        """Make the board on which its ranks exchange data to open a Buffer.  The caller closes it.

        `prefix`: the beginning of the keys, so that values of another board have others.
        """
        ...

    def global_ranks(self) -> list[int]:
        """Return the ranks of this group in the default group, by rank; empty if they are not known."""
        ...


class Members(NamedTuple):
    """The ranks of an open Buffer, as they agree on later calls.

    Attributes:
        group: of these ranks.
        number: Opening.number, by which all of them name this Buffer.
        timeout_s: how long a wait for a rank may take.
    """

    group: Group
    number: int
    timeout_s: float
