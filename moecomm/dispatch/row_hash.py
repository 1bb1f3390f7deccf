"""Hashes of rows: on CPUs of the native module, on GPUs in plain torch, which a graph can capture."""

from __future__ import annotations

import torch

from moecomm import _native

_PIECE = 1 << 22  # words that are hashed at a time, which take 12 bytes of memory each


def hash_rows(rows: torch.Tensor, scales: torch.Tensor | None, places: torch.Tensor | None = None) -> torch.Tensor:
    """Hash the bytes of rows `[n, H]`, and of their scales `[n, m]`, to int64 `[n]`.  Does not wait for the device.

    A change inside of one word of 4 bytes always changes the hash; one of several words goes unseen with a probability
    of at most 2^-32.

    Args:
        rows: contiguous.
        scales: with strides of any kind.
        places: CPUs: int64, the numbers of the rows to hash; None: all.
    """
    parts = [rows if rows.element_size() != 1 else rows.view(torch.uint8)]
    if scales is not None:
        parts.append(_packed(scales))
    return _on_cpu(parts, places) if rows.device.type == "cpu" else _by_words([_words(part) for part in parts])


def _on_cpu(parts: list[torch.Tensor], places: torch.Tensor | None) -> torch.Tensor:
    count = len(parts[0]) if places is None else len(places)
    found = torch.zeros(count, dtype=torch.int64)
    for part in parts:
        pitch, width = part.stride(0) * part.element_size(), part.shape[1] * part.element_size()
        where = 0 if places is None else places.data_ptr()
        if count:
            _native.hash_rows(found.data_ptr(), part.data_ptr(), pitch, width, where, count)
    return found


def _by_words(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum the words of each row, each times an odd number of 64 bits that depends on its place."""
    count, columns = len(parts[0]), sum(part.shape[1] for part in parts)
    found = torch.zeros(count, dtype=torch.int64, device=parts[0].device)
    factors = _factors(columns, found.device)
    step = max(1, _PIECE // columns)
    for first in range(0, count, step):
        at = 0
        for part in parts:
            width = part.shape[1]
            found[first : first + step] += (part[first : first + step] * factors[at : at + width]).sum(dim=1)
            at += width
    return found


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with the strides of a contiguous tensor, also those of one row or column."""
    data = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    if data.stride() == (data.shape[1], 1):
        return data
    return torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row as int32, padded with zeros."""
    if len(rows) == 0:  # has strides of any kind
        return torch.zeros(0, -(-rows.shape[1] * rows.element_size() // 4), dtype=torch.int32, device=rows.device)
    data = _packed(rows).view(torch.uint8)
    if short := -data.shape[1] % 4:
        data = torch.nn.functional.pad(data, (0, short))
    return data.view(torch.int32)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers: those of the generator splitmix64, wrapped to int64.

    Made anew for each call: another stream, or one after a capture, would read kept ones before they are written.
    """
    at = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        at = (at ^ _shifted(at, shift)) * factor
    return (at ^ _shifted(at, 31)) | 1


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, zeros in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
