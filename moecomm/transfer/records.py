"""Records: the tensors of one expert as they travel, one after the other, with their hashes.

A record ends with a hash of each tensor and the number of the stage().  The sender hashes its casts before, or as, it
writes them to a Window, and the receiver hashes the bytes in its own.  So a hash that differs, or a number of an
earlier stage(), shows which tensor is not what the sender meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from moecomm.transfer.casts import Kind

ALIGNMENT = 16  # bytes; of each tensor
_RECORD = 256  # bytes; records are a multiple of it
WORD = 8  # bytes of a hash


class Piece(NamedTuple):
    """A tensor in a record: its bytes from `begin` to `end`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class Records:
    """The layout of a record, the same on all ranks.

    Attributes:
        kinds: the tensors of an expert, in order.
        pieces: the tensors in a record, in order; those of a kind lie together.
        trailer: first byte behind them: of the hashes, and of the number of the stage().
        nbytes: size of a record.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.kinds = list(kinds.values())
        self.pieces: list[Piece] = []
        at = 0
        for name, kind in kinds.items():
            for shape, dtype in kind.parts:
                end = at + math.prod(shape) * dtype.itemsize
                self.pieces.append(Piece(name, shape, dtype, at, end))
                at = -(-end // ALIGNMENT) * ALIGNMENT
        self.trailer = at
        self.nbytes = -(-(at + WORD * self.words) // _RECORD) * _RECORD

    @property
    def words(self) -> int:
        """Return the number of hashes of a record, with the number of the stage()."""
        return len(self.pieces) + 1

    def words_of(self, record: torch.Tensor) -> torch.Tensor:
        """Return a view of the hashes in a record, and of the number behind them."""
        return record[self.trailer : self.trailer + WORD * self.words].view(torch.int64)

    def found(self, records: int, device: torch.device) -> torch.Tensor:
        """Return zeros for the words of records that arrive: two rows each, hashes of what is there and what is said.

        Rows are multiples of 16 bytes, so each may have a word more.
        """
        return torch.zeros(records, 2, self.words + self.words % 2, dtype=torch.int64, device=device)

    def differs(self, found: list[list[int]], number: int) -> str | None:
        """Return the name of the first tensor that is not what its sender hashed for this stage(); None: all are."""
        mine, said = found
        for at, piece in enumerate(self.pieces):
            if mine[at] != said[at] or said[self.words - 1] != number:
                return piece.name
        return None

    def parts(self, record: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the tensors in a record, in order."""
        return [record[piece.begin : piece.end].view(piece.dtype).view(piece.shape) for piece in self.pieces]


class Leaving(NamedTuple):
    """An expert to cast: its tensors, one of each kind, and the record for them, which may be a peer's."""

    record: torch.Tensor
    tensors: Sequence[torch.Tensor]


class Arriving(NamedTuple):
    """An expert to verify.

    Attributes:
        record: where it goes.
        source: where it is; the same memory: it is there.
        found: its two rows of Records.found().
    """

    record: torch.Tensor
    source: torch.Tensor
    found: torch.Tensor


class Carrier(Protocol):
    """The work of a rank on the bytes of records.  On GPUs all of it is enqueued on the current stream."""

    def batch(self, experts: int) -> int:
        """Return how many of these experts to write at once."""
        ...

    def write(self, leaving: Sequence[Leaving], number: int) -> None:
        """Cast experts to records, with their hashes and the number of the stage()."""
        ...

    def tell(self, words: Sequence[torch.Tensor], value: int) -> None:
        """Set words of readers, which then see all that was written before."""
        ...

    def read(self, arriving: Sequence[Arriving]) -> None:
        """Copy records, and hash what has arrived."""
        ...

    def switch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors: of each pair, the second to the first."""
        ...
