"""The ranks of a Buffer, as the code that opens one sees them."""

from __future__ import annotations

from typing import Protocol

from moecomm.ranks.board import Board


class Rendezvous(Protocol):
    """The ranks of one Buffer.  `in_process`: all ranks are threads of this process."""

    rank: int
    ranks: int
    in_process: bool

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank.  All ranks must pass the same number of bytes."""
        ...


class Group(Rendezvous, Protocol):
    """A Rendezvous over which Buffers open."""

    def board(self) -> Board:
        """Make the board on which its ranks exchange data to open a Buffer.  The caller closes it."""
        ...

    def global_ranks(self) -> list[int]:
        """Return its ranks in the default group, by rank; empty where they are not known."""
        ...
