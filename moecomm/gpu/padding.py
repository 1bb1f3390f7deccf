"""Zeros in rows without a token, for experts that read all rows and for gradients of weights."""

from __future__ import annotations

import ctypes

import torch

from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import fields_of

_WORDS = {"uint4": 16, "u32": 4, "u8": 1}


class Args(ctypes.Structure):
    """PaddingArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("PaddingArgs")


def kernel(word: str) -> plain_kernel.PlainKernel:
    """Return the kernel; `word`: the type in which rows are written, uint4 where they allow it."""
    return row_pass.kernel("elementwise/used_rows", f"zero_padding<{word}>", "PaddingArgs")


def word_of(multiple: int) -> str:
    """Return the largest type of a word that divides addresses and bytes of rows, all of them multiples of this."""
    return next(name for name, size in _WORDS.items() if multiple % size == 0)


def zero(
    rows: torch.Tensor,
    *,
    src: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Write zeros into empty rows; read and write no others.  On the current stream.

    Args:
        rows: contiguous, `[rows, n]`, or `[groups, rows of each, n]`.
        src: int32 `[rows, 2]`, Routed.src of expert or batched rows; a row without a source is empty.
        num_rows: int32 `[1]`: every row from this one on is empty.
        counts: int32 `[groups]`: in each group, the rows after so many are empty.
    """
    if rows.is_cuda:
        _by_kernel(rows, src=src, num_rows=num_rows, counts=counts)
    else:
        clear(rows, empty(rows.shape[:-1], src=src, num_rows=num_rows, counts=counts))


def clear(rows: torch.Tensor, empty: torch.Tensor) -> None:
    """Write zeros into rows that `empty`, bool of their shape without the last dimension, marks; on a CPU."""
    (rows.view(torch.uint8) if rows.itemsize == 1 else rows)[empty] = 0


def told(
    layout: str, src: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the arguments of `zero` that mark the empty rows of a dispatch."""
    if layout == "batched":
        return {"counts": tokens_per_expert}
    return {"num_rows": num_rows} if layout == "flat" else {"num_rows": num_rows, "src": src}


def empty(
    shape: torch.Size,
    *,
    src: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which rows are empty, as bool of this shape; on a CPU."""
    row = torch.arange(shape[-1])
    none = torch.zeros(shape, dtype=torch.bool)
    if src is not None:
        none |= src[..., 0] < 0
    if num_rows is not None:
        none |= row >= num_rows
    if counts is not None:
        none |= row >= counts.unsqueeze(1)
    return none


def args_of(
    rows: int,
    nbytes: int,
    shape: torch.Size,
    *,
    src: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Args:
    """Return the arguments for `shape` rows of `nbytes` each at the address `rows`."""
    return Args(rows, *map(row_pass.address, (src, num_rows, counts)), nbytes, shape.numel(), shape[-1])


def _by_kernel(rows: torch.Tensor, **told: torch.Tensor | None) -> None:
    count, nbytes = rows.shape[:-1].numel(), rows.shape[-1] * rows.itemsize
    if count == 0:
        return
    args = args_of(rows.data_ptr(), nbytes, rows.shape[:-1], **told)
    row_pass.launch(kernel(word_of(rows.data_ptr() | nbytes)), rows.device, count * row_pass.ROW, args)
