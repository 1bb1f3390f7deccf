"""Copies of the rows that hold a token: outputs have room for many more than arrive."""

from __future__ import annotations

import ctypes

import torch

from moecomm.gpu import padding, plain_kernel, row_pass
from moecomm.gpu.structs import fields_of


class _Args(ctypes.Structure):
    """CopyRowsArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("CopyRowsArgs", PaddingArgs=padding.Args)


def kernel(word: str) -> plain_kernel.PlainKernel:
    """Return the kernel; `word`: the type in which rows are copied, see padding.word_of()."""
    return row_pass.kernel("elementwise/used_rows", f"copy_rows<{word}>", "CopyRowsArgs")


def load(device: int, nbytes: int) -> None:
    """Load the kernel for rows of so many bytes, which a capture cannot do."""
    plain_kernel.load(kernel(padding.word_of(nbytes)), device)


def copy(
    to: torch.Tensor,
    rows: torch.Tensor,
    *,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Copy the rows in use; write no others.  On the current stream.

    Args:
        to, rows: contiguous, of one shape: `[rows, n]`, or `[groups, rows of each, n]`.
        num_rows: int32 `[1]`: rows in use.
        counts: int32 `[groups]`: rows in use of each group.
    """
    if rows.is_cuda:
        by_kernel(to, rows, num_rows=num_rows, counts=counts)
    elif num_rows is not None:
        to[: int(num_rows)] = rows[: int(num_rows)]
    else:
        assert counts is not None
        for group, count in enumerate(counts.tolist()):
            to[group, :count] = rows[group, :count]


def by_kernel(
    to: torch.Tensor,
    rows: torch.Tensor,
    *,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Do copy() by a kernel."""
    if rows.numel() == 0:
        return
    told = {"num_rows": num_rows, "counts": counts}
    count, nbytes = rows.shape[:-1].numel(), rows.shape[-1] * rows.itemsize
    args = _Args(padding.args_of(rows.data_ptr(), nbytes, rows.shape[:-1], **told), to.data_ptr())
    word = padding.word_of(rows.data_ptr() | to.data_ptr() | nbytes)
    row_pass.launch(kernel(word), rows.device, count * row_pass.ROW, args)
