"""Copies of the rows that hold a token: outputs have room for many more than arrive."""

from __future__ import annotations

import torch

from moecomm.gpu import padding, plain_kernel, row_pass
from moecomm.gpu.structs import struct


def load(device: int, nbytes: int) -> None:
    """Load the kernel for rows of so many bytes, which a capture cannot do."""
    plain_kernel.load(row_pass.kernel("copy_rows", padding.word_of(nbytes)), device)


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
    if rows.numel() == 0:
        return
    if rows.is_cuda:
        shape, at, nbytes = rows.shape[:-1], rows.data_ptr(), rows.shape[-1] * rows.itemsize
        kernel = row_pass.kernel("copy_rows", padding.word_of(at | to.data_ptr() | nbytes))
        of = struct("PaddingArgs")(**padding.fields_of(at, nbytes, shape, num_rows=num_rows, counts=counts))
        row_pass.run(kernel, rows.device, of.count * row_pass.ROW, of=of, to=to.data_ptr())
    elif num_rows is not None:
        to[: int(num_rows)] = rows[: int(num_rows)]
    else:
        assert counts is not None
        for group, count in enumerate(counts.tolist()):
            to[group, :count] = rows[group, :count]
