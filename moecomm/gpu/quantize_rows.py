"""Casts of rows to the formats of moecomm/base/formats.py, on GPUs by kernels with the same bits."""

from __future__ import annotations

import ctypes

import torch

from moecomm.base import formats
from moecomm.base.protocol import PASS_THREADS
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import fields_of

NAMES = tuple(name for name in formats.FORMATS if name != "fp8")
_PIECE = 16  # columns that a thread casts at once


class _Args(ctypes.Structure):
    """QuantizeArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("QuantizeArgs")


def kernel(name: str, dtype: torch.dtype, aligned: bool) -> plain_kernel.PlainKernel:
    """Return the kernel that casts rows of this dtype to a format.

    `aligned`: rows and their values begin at multiples of 16 bytes, and have a multiple of 16 columns.
    """
    entry = f"quantize_rows<Type::{row_pass.TYPES[dtype]}, Format::{name}, {str(aligned).lower()}>"
    return row_pass.kernel("elementwise/quantize_rows", entry, "QuantizeArgs")


def load(device: int, name: str, dtype: torch.dtype, hidden: int) -> None:
    """Load the kernel for aligned rows of so many columns, which a capture cannot do."""
    plain_kernel.load(kernel(name, dtype, hidden % _PIECE == 0), device)


def cast(
    x: torch.Tensor, name: str, *, scale_format: str = "fp32", global_scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cast rows, as formats.quantize() does.  On GPUs, on the current stream; graphs can capture it."""
    if x.is_cuda and name in NAMES:
        return by_kernel(x, name, scale_format=scale_format, global_scale=global_scale)
    return formats.quantize(x, name, scale_format=scale_format, global_scale=global_scale)


def by_kernel(
    x: torch.Tensor, name: str, *, scale_format: str = "fp32", global_scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do cast() by a kernel, to one of NAMES."""
    fmt, given = formats.check(x, name, scale_format, global_scale)
    x = x.contiguous()
    count, hidden = x.shape
    rows = torch.empty(count, fmt.value_columns(hidden), dtype=fmt.values, device=x.device)
    scales = None
    if fmt.scales is not None:
        scales = torch.empty(count, fmt.scale_columns(hidden), dtype=fmt.scales, device=x.device)
    if count == 0:
        return rows, scales
    args = _Args(x=x.data_ptr(), values=rows.data_ptr(), scales=row_pass.address(scales), count=count, hidden=hidden)
    if isinstance(given, torch.Tensor):
        args.global_scale = given.data_ptr()
    elif given is not None:
        args.global_bits = ctypes.c_int32.from_buffer_copy(ctypes.c_float(given)).value
    threads = count * (PASS_THREADS if fmt.group == "row" else -(-hidden // (row_pass.ROW * _PIECE)) * row_pass.ROW)
    aligned = hidden % _PIECE == 0 and (x.data_ptr() | rows.data_ptr()) % 16 == 0
    row_pass.launch(kernel(name, x.dtype, aligned), x.device, threads, args)
    return rows, scales
