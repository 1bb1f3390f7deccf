"""Zeros in rows without a token, for experts that read all rows and for gradients of weights."""

from __future__ import annotations

import torch

from moecomm.gpu import row_pass


def word_of(multiple: int) -> str:
    """Return the largest type of a word that divides addresses and bytes of rows, all of them multiples of this."""
    return "uint4" if multiple % 16 == 0 else "u32" if multiple % 4 == 0 else "u8"


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
    shape = rows.shape[:-1]
    if not rows.is_cuda:
        clear(rows, empty(shape, src=src, num_rows=num_rows, counts=counts))
    elif (count := shape.numel()) > 0:
        at, nbytes = rows.data_ptr(), rows.shape[-1] * rows.itemsize
        fields = fields_of(at, nbytes, shape, src, num_rows, counts)
        row_pass.run(row_pass.kernel("zero_padding", word_of(at | nbytes)), rows.device, count * row_pass.ROW, **fields)


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


def fields_of(
    rows: int,
    nbytes: int,
    shape: torch.Size,
    src: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> dict[str, int]:
    """Return the fields of PaddingArgs for `shape` rows of `nbytes` each at the address `rows`; others: see zero()."""
    fields = {"rows": rows, "bytes": nbytes, "count": shape.numel(), "group": shape[-1]}
    for name, tensor in (("src", src), ("num_rows", num_rows), ("counts", counts)):
        if tensor is not None:
            fields[name] = tensor.data_ptr()
    return fields
