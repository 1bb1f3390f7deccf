"""Records: the tensors of one expert as they travel, one after the other, with their hashes.

A record ends with a hash of each tensor and the number of the stage().  The sender hashes its casts before it copies
them to its Window, and the receiver hashes the bytes in its own.  So a hash that differs, or a number of an earlier
stage(), shows which tensor is not what the sender meant.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from moecomm import _native
from moecomm.base.protocol import PASS_THREADS
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import struct
from moecomm.transfer.casts import Kind

_ALIGNMENT = 16  # bytes; of each tensor
_RECORD = 256  # bytes; records are a multiple of it
_WORD = 8  # bytes of a hash
_OF_A_THREAD = 64  # bytes that a thread of a GPU copies at once
COPY_HASHED = plain_kernel.PlainKernel("window/copy_hashed", "copy_hashed", "CopyHashedArgs", PASS_THREADS)


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
        self.nbytes = -(-(at + _WORD * self.words) // _RECORD) * _RECORD

    def write(self, record: torch.Tensor, tensors: list[torch.Tensor], number: int) -> None:
        """Write the parts of all tensors of an expert, then their hashes and the number of the stage()."""
        words = torch.zeros(self.words, dtype=torch.int64, device=record.device)  # the record may be a peer's
        for at, (piece, tensor) in enumerate(zip(self._pieces, tensors, strict=True)):
            given = tensor.contiguous().view(-1).view(torch.uint8)
            copy_hashed(record[piece.begin : piece.end], given, words[at : at + 1], arrived=False)
        words[-1:].fill_(number)
        self._words(record).copy_(words)

    def read(self, record: torch.Tensor, source: torch.Tensor, found: torch.Tensor) -> None:
        """Copy a record, and hash what has arrived.

        Args:
            record: where it goes.
            source: where it is; the same memory: it is there.
            found: int64 zeros, two rows: hashes of the tensors, and what the record says; each ends with the number.
        """
        for at, piece in enumerate(self._pieces):
            part = slice(piece.begin, piece.end)
            copy_hashed(record[part], source[part], found[0, at : at + 1], arrived=True)
        words = self._words(record)
        if source.data_ptr() != record.data_ptr():
            words.copy_(self._words(source))
        found[1].copy_(words)
        found[0, -1:].copy_(words[-1:])

    @property
    def words(self) -> int:
        """Return the number of hashes of a record, with the number of the stage()."""
        return len(self._pieces) + 1

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
        return record[self._trailer : self._trailer + _WORD * self.words].view(torch.int64)


def copy_hashed(to: torch.Tensor, source: torch.Tensor, found: torch.Tensor, *, arrived: bool) -> None:
    """Copy bytes, unless both are the same, and add their hash to `found`, int64 `[1]` with 0.

    `arrived`: CPUs hash what has been written, else what is to be.
    """
    if not len(to):
        return
    here, there = source.data_ptr(), to.data_ptr()
    if not to.is_cuda:
        found.fill_(ctypes.c_int64(_native.copy_hashed(there, here, len(to), arrived)).value)
        return
    if here % _ALIGNMENT:
        source = source.clone()  # aligned, and hashed before it leaves
        here = source.data_ptr()
    args = struct(COPY_HASHED.args)(0 if here == there else there, here, found.data_ptr(), len(to))
    plain_kernel.launch_on(to.device, COPY_HASHED, row_pass.blocks_of(len(to) // _OF_A_THREAD), args)
