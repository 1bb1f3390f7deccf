"""Records of CPU ranks, by native loops: one expert after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from moecomm import _native
from moecomm.transfer.records import Arriving, Leaving, Piece, Records


class HostCarrier:
    """A Carrier of CPU ranks."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def batch(self, experts: int) -> int:
        """Return one: each is told to its readers at once."""
        return 1

    def write(self, leaving: Sequence[Leaving], number: int) -> None:
        """Cast, hash the casts, and copy them."""
        records = self._records
        for record, tensors in leaving:
            words = records.words_of(record)
            parts = (part for kind, tensor in zip(records.kinds, tensors, strict=True) for part in kind.apply(tensor))
            for at, (piece, part) in enumerate(zip(records.pieces, parts, strict=True)):
                given = part.contiguous()
                words[at] = _copy_hashed(record, piece, given.data_ptr(), arrived=False)
            words[-1] = number

    def tell(self, words: Sequence[torch.Tensor], value: int) -> None:
        """Set words of readers, by release stores."""
        for word in words:
            _native.store_u64(word.data_ptr(), value)

    def read(self, arriving: Sequence[Arriving]) -> None:
        """Copy records, and hash what has been written."""
        records = self._records
        for record, source, found in arriving:
            for at, piece in enumerate(records.pieces):
                found[0, at] = _copy_hashed(record, piece, source.data_ptr() + piece.begin, arrived=True)
            found[1, : records.words] = records.words_of(source)

    def switch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors by torch."""
        for to, part in copies:
            to.copy_(part)


def _copy_hashed(record: torch.Tensor, piece: Piece, source: int, *, arrived: bool) -> int:
    """Copy a piece of a record from an address, unless it is there, and return its hash.

    `arrived`: of what has been written, else of what is to be.
    """
    nbytes = piece.end - piece.begin
    if not nbytes:
        return 0
    return ctypes.c_int64(_native.copy_hashed(record.data_ptr() + piece.begin, source, nbytes, arrived)).value
