"""Products of the operators without fusion: float32 accumulation, and one rounding to the dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moecomm.fused.fp8 import Fp8, widen
from moecomm.fused.gemm import grouped_gemm
from moecomm.fused.kernels import MOST_GROUPS
from moecomm.fused.operands import unfit
from moecomm.overlap.sizes import GROUP, OF_FP8, Matrix


def product(x: Matrix, w: Matrix) -> torch.Tensor:
    """Compute `x @ w.mT` in the dtype of x, which is that of w; both may be batched alike.  FP8: in bfloat16.

    Autocast is disabled, because it would choose another dtype.
    """
    if isinstance(x, Fp8) or isinstance(w, Fp8):
        if isinstance(x, Fp8) and isinstance(w, Fp8) and _has_kernel(w.data):
            return _by_kernel(x, w)
        return multiply(wide_rows(x), wide_weights(w), OF_FP8)
    if x.device.type == "cpu":  # some of torch's 16-bit products on CPUs round between blocks of K
        return multiply(x.float(), w.float(), x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return x @ w.mT


def multiply(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `x @ w.mT` of float32, rounded to `dtype`."""
    with torch.autocast(x.device.type, enabled=False):
        return (x @ w.mT).to(dtype)


def wide_rows(x: Matrix) -> torch.Tensor:
    """Return rows in float32; FP8: times their scales."""
    return widen(*x, 1) if isinstance(x, Fp8) else x.float()


def wide_weights(w: Matrix) -> torch.Tensor:
    """Return weights in float32; FP8: times their scales."""
    return widen(*w, GROUP) if isinstance(w, Fp8) else w.float()


def _has_kernel(w: torch.Tensor) -> bool:
    """Return whether the grouped GEMM multiplies by such FP8 weights on their device."""
    columns, depth = w.shape[-2:]
    hopper = w.is_cuda and torch.cuda.get_device_capability(w.device) == (9, 0)
    experts = w.shape[0] if w.ndim == 3 else 1
    return hopper and w.numel() > 0 and experts <= MOST_GROUPS and not unfit(columns, depth, True, False, True)


def _by_kernel(x: Fp8, w: Fp8) -> torch.Tensor:
    """Compute the product by the grouped GEMM: each matrix of w is an expert, for as many rows."""
    rows = x.data.shape[-2]
    if w.data.ndim == 2:
        w = Fp8(w.data.unsqueeze(0), w.scales.unsqueeze(0))
    counts = torch.full((len(w.data),), rows, dtype=torch.int32, device=x.data.device)
    return grouped_gemm(x, w, counts)


def sum_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one dtype in float32, in their order, and round once."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(first.dtype)
