"""The gradients of a combine with weights, of y and of the weights: one pass over the rows on a GPU."""

from __future__ import annotations

import ctypes

import torch

from moecomm import plain_kernel
from moecomm.ops.rounds import rows_of
from moecomm.padding import blocks

_THREADS = 256  # kGradientThreads of csrc/device/combine_gradients.cuh
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class _Args(ctypes.Structure):
    """GradientArgs of csrc/device/combine_gradients.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("rows", "y", "weights", "to_y", "to_weights")),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "blocks", "pad")),
    )


def kernel(dtype: torch.dtype) -> plain_kernel.PlainKernel:
    """`dtype`: of rows, and of y."""
    entry = f"combine_gradients<Type::{_TYPES[dtype]}>"
    return plain_kernel.PlainKernel("device/combine_gradients", entry, "GradientArgs", _THREADS)


@torch.library.custom_op("moecomm::combine_gradients", mutates_args=())
def combine_gradients(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """That of y, of `dtype`; and of the weights, float32, [0] without y.

    Args:
        rows: `[..., H]`, for each row of y the gradient of its token.
        row_weights: float32 `[...]`.
        y: as rows, of `dtype`; None: nobody wants the gradient of the weights.
    """
    if rows.is_cuda and rows.dtype is dtype:
        return by_kernel(rows, row_weights, y)
    grad = (rows.float() * row_weights.unsqueeze(-1)).to(dtype)
    return grad, row_weights.new_empty(0) if y is None else (y.float() * rows.float()).sum(dim=-1)


@combine_gradients.register_fake
def _(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape, dtype=dtype), row_weights.new_empty((0,) if y is None else row_weights.shape)


def by_kernel(
    rows: torch.Tensor, row_weights: torch.Tensor, y: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where all have one dtype."""
    rows, row_weights = rows_of(rows), row_weights.contiguous()
    grad, grad_weights = torch.empty_like(rows), row_weights.new_empty((0,) if y is None else row_weights.shape)
    if row_weights.numel() == 0:
        return grad, grad_weights
    y = None if y is None else rows_of(y)
    at = (rows.data_ptr(), 0 if y is None else y.data_ptr(), *(t.data_ptr() for t in (row_weights, grad, grad_weights)))
    launched = blocks(-(-row_weights.numel() // (_THREADS // 32)))
    args = _Args(*at, row_weights.numel(), rows.shape[-1], launched)
    plain_kernel.launch_on(rows.device, kernel(rows.dtype), launched, args)
    return grad, grad_weights
