"""Casts of rows to the formats of moecomm/base/formats.py, on GPUs by kernels with the same bits."""

from __future__ import annotations

import ctypes

import torch

from moecomm.base import formats
from moecomm.base.protocol import PASS_THREADS
from moecomm.gpu import plain_kernel, row_pass

NAMES = tuple(name for name in formats.FORMATS if name != "fp8")
PIECE = 16  # columns that a thread casts at once


def kernel(name: str, dtype: torch.dtype, aligned: bool) -> plain_kernel.PlainKernel:
    """Return the kernel that casts rows of this dtype to a format.

    `aligned`: rows and their values begin at multiples of 16 bytes, and have a multiple of 16 columns.
    """
    return row_pass.kernel("quantize_rows", row_pass.TYPES[dtype], f"Format::{name}", str(aligned).lower())


def load(device: int, name: str, dtype: torch.dtype, hidden: int) -> None:
    """Load the kernel for aligned rows of so many columns, which a capture cannot do."""
    plain_kernel.load(kernel(name, dtype, hidden % PIECE == 0), device)


def cast(
    x: torch.Tensor, name: str, *, scale_format: str = "fp32", global_scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cast rows, as formats.quantize() does.  On GPUs, on the current stream; graphs can capture it."""
    if not (x.is_cuda and name in NAMES):
        return formats.quantize(x, name, scale_format=scale_format, global_scale=global_scale)
    fmt, given = formats.check(x, name, scale_format, global_scale)
    x = x.contiguous()
    count, hidden = x.shape
    rows = torch.empty(count, fmt.value_columns(hidden), dtype=fmt.values, device=x.device)
    scales = None
    if fmt.scales is not None:
        scales = torch.empty(count, fmt.scale_columns(hidden), dtype=fmt.scales, device=x.device)
    if count == 0:
        return rows, scales
    fields = {"x": x.data_ptr(), "values": rows.data_ptr(), "count": count, "hidden": hidden}
    if scales is not None:
        fields["scales"] = scales.data_ptr()
    if isinstance(given, float):
        fields["global_bits"] = ctypes.c_int32.from_buffer_copy(ctypes.c_float(given)).value
    elif given is not None:
        fields["global_scale"] = given.data_ptr()
    threads = count * (PASS_THREADS if fmt.group == "row" else -(-hidden // (row_pass.ROW * PIECE)) * row_pass.ROW)
    aligned = hidden % PIECE == 0 and (fields["x"] | fields["values"]) % 16 == 0
    row_pass.run(kernel(name, x.dtype, aligned), x.device, threads, **fields)
    return rows, scales


def blocks_kernel(dtype: torch.dtype) -> plain_kernel.PlainKernel:
    """Return the kernel that casts blocks of 128 x 128 of a matrix of this dtype."""
    return row_pass.kernel("quantize_blocks", row_pass.TYPES[dtype])


def cast_blocks(matrix: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> bool:
    """Cast a matrix on a GPU to e4m3 with a scale for each block of 128 x 128, as fused.quantize_weights() does.

    Return False, and cast nothing, if the matrix has no kernel: it is not on a GPU, or not aligned.  All tensors are
    contiguous.
    """
    count, hidden = matrix.shape
    fields = {"x": matrix.data_ptr(), "values": values.data_ptr(), "scales": scales.data_ptr()}
    if not matrix.is_cuda or hidden % PIECE or (fields["x"] | fields["values"]) % 16:
        return False
    threads = scales.numel() * PASS_THREADS
    row_pass.run(blocks_kernel(matrix.dtype), matrix.device, threads, **fields, count=count, hidden=hidden)
    return True
