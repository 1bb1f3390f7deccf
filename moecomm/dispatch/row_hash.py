"""Hashes of rows, in plain torch: on a GPU without waiting for it, and in a graph that is captured."""

from __future__ import annotations

from functools import lru_cache

import torch

_PIECE = 1 << 22  # words that are hashed at a time, which take 12 bytes of memory each


def hash_rows(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Hash the bytes of rows `[n, H]`, and of their scales `[n, m]`, to int64 `[n]`.

    A hash is the sum of the words of 4 bytes, each times an odd number of 64 bits that depends on its place.  So a
    change inside of one word always changes it; one of several words goes unseen with a probability of at most 2^-32.
    """
    parts = [_words(rows)]
    if scales is not None:
        parts.append(_words(scales))
    count = len(rows)
    found = torch.zeros(count, dtype=torch.int64, device=rows.device)
    columns = sum(part.shape[1] for part in parts)
    factors = _factors(columns, rows.device)
    step = max(1, _PIECE // columns)
    for first in range(0, count, step):
        at = 0
        for part in parts:
            width = part.shape[1]
            found[first : first + step] += (part[first : first + step] * factors[at : at + width]).sum(dim=1)
            at += width
    return found


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row as int32, padded with zeros."""
    if len(rows) == 0:  # has strides of any kind
        return torch.zeros(0, -(-rows.shape[1] * rows.element_size() // 4), dtype=torch.int32, device=rows.device)
    data = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    if not data.is_contiguous() or data.stride(-1) != 1:  # also of one column, whose stride may be any
        data = torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)
    data = data.view(torch.uint8)
    if short := -data.shape[1] % 4:
        data = torch.nn.functional.pad(data, (0, short))
    return data.view(torch.int32)


@lru_cache(maxsize=16)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers: those of the generator splitmix64, wrapped to int64."""
    at = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        at = (at ^ _shifted(at, shift)) * factor
    return (at ^ _shifted(at, 31)) | 1


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, zeros in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
