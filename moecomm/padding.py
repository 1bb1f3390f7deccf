"""Zeros in rows where no token arrived: experts that go through all rows find them, and so do gradients of weights."""

from __future__ import annotations

import ctypes

import torch

from moecomm import plain_kernel

_THREADS, _MOST_BLOCKS = 256, 528  # kPaddingThreads of csrc/device/padding.cuh; four a multiprocessor of an H200


class _Args(ctypes.Structure):
    """PaddingArgs of csrc/device/padding.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("rows", "src", "num_rows", "counts")),
        ("bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "group", "blocks", "pad")),
    )


def kernel(word: str) -> plain_kernel.PlainKernel:
    """`word`: what rows are written in, uint4 where they allow it."""
    return plain_kernel.PlainKernel("device/padding", f"zero_padding<{word}>", "PaddingArgs", _THREADS)


def zero(
    rows: torch.Tensor,
    *,
    src: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Writes zeros into empty rows, and reads and writes no others.  On the current stream.

    Args:
        rows: contiguous, `[rows, n]`, or `[groups, rows of each, n]`.
        src: int32 `[rows, 2]`, Routed.src of rows of experts: one without a source is empty.
        num_rows: int32 `[1]`: so is every row from this one on.
        counts: int32 `[groups]`: and those of a group behind so many.
    """
    group = rows.shape[-2]
    count = rows.numel() // max(1, rows.shape[-1])
    if count == 0:
        return
    if not rows.is_cuda:
        empty = _empty(count, group, src, num_rows, counts)
        (rows.view(torch.uint8) if rows.itemsize == 1 else rows).view(count, -1)[empty] = 0
        return
    _launch(rows, count, group, src, num_rows, counts)


def _launch(
    rows: torch.Tensor,
    count: int,
    group: int,
    src: torch.Tensor | None,
    num_rows: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    nbytes = rows.shape[-1] * rows.itemsize
    word = next(name for name, size in (("uint4", 16), ("u32", 4), ("u8", 1)) if (rows.data_ptr() | nbytes) % size == 0)
    at = [0 if tensor is None else tensor.data_ptr() for tensor in (src, num_rows, counts)]
    blocks = min(_MOST_BLOCKS, -(-count // (_THREADS // 32)))
    args = _Args(rows.data_ptr(), *at, nbytes, count, group, blocks)
    plain_kernel.launch_on(rows.device, kernel(word), blocks, args)


def _empty(
    count: int,
    group: int,
    src: torch.Tensor | None,
    num_rows: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """Which rows are."""
    row = torch.arange(count)
    empty = torch.zeros(count, dtype=torch.bool)
    if src is not None:
        empty |= src[:, 0] < 0
    if num_rows is not None:
        empty |= row >= num_rows
    if counts is not None:
        empty |= row % group >= counts.repeat_interleave(group)
    return empty
