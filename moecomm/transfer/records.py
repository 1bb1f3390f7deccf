"""Records: the tensors of one expert as they travel, one after the other, with their hashes.

A record ends with a hash of each tensor and the number of the stage().  The sender hashes its casts before it copies
them to its Window, and the receiver hashes the bytes in its own.  So a hash that differs, or a number of an earlier
stage(), shows which tensor is not what the sender meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from moecomm.dispatch.row_hash import hash_rows
from moecomm.transfer.casts import Kind

_ALIGNMENT = 16  # bytes; of each tensor
_RECORD = 256  # bytes; records are a multiple of it
_WORD = 8  # bytes of a hash


class _Piece(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class Records:
    """The layout of a record, the same on all ranks.

    Attributes:
        nbytes: size of a record.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._pieces: list[_Piece] = []
        at = 0
        for name, kind in kinds.items():
            for shape, dtype in kind.parts:
                end = at + math.prod(shape) * dtype.itemsize
                self._pieces.append(_Piece(name, shape, dtype, at, end))
                at = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._trailer = at
        self.nbytes = -(-(at + _WORD * (len(self._pieces) + 1)) // _RECORD) * _RECORD

    def write(self, record: torch.Tensor, tensors: list[torch.Tensor], number: int) -> None:
        """Write the parts of all tensors of an expert, then their hashes and the number of the stage()."""
        hashes = []
        for piece, tensor in zip(self._pieces, tensors, strict=True):
            given = tensor.contiguous().view(-1).view(torch.uint8)
            hashes.append(_hash(given))
            record[piece.begin : piece.end].copy_(given)
        stamp = torch.full((1,), number, dtype=torch.int64, device=record.device)
        self._words(record).copy_(torch.cat([*hashes, stamp]))

    def hashes(self, record: torch.Tensor) -> torch.Tensor:
        """Return the hashes of a record's tensors, and those stored in it: two rows, each ending with the number."""
        found = [_hash(record[piece.begin : piece.end]) for piece in self._pieces]
        words = self._words(record)
        return torch.stack([torch.cat([*found, words[-1:]]), words])

    def differs(self, hashes: list[list[int]], number: int) -> str | None:
        """Return the name of the first tensor that is not what its sender hashed for this stage(); None: all are."""
        found, said = hashes
        for piece, mine, theirs in zip(self._pieces, found, said, strict=False):
            if mine != theirs or said[-1] != number:
                return piece.name
        return None

    def parts(self, record: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the tensors in a record, in order."""
        return [record[piece.begin : piece.end].view(piece.dtype).view(piece.shape) for piece in self._pieces]

    def _words(self, record: torch.Tensor) -> torch.Tensor:
        return record[self._trailer : self._trailer + _WORD * (len(self._pieces) + 1)].view(torch.int64)


def _hash(data: torch.Tensor) -> torch.Tensor:
    """Hash bytes to int64 `[1]`."""
    if not len(data):
        return torch.zeros(1, dtype=torch.int64, device=data.device)
    return hash_rows(data[None], None)
