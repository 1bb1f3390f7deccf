"""Experts of one rank: two products, and the activation between them."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import grouped_mm, pad

from moecomm.dispatch.reference import GROUP
from moecomm.fused import reference
from moecomm.fused.activations import SWIGLU, GatedActivation
from moecomm.fused.biases import Biases, add_bias, group_of_rows
from moecomm.fused.fp8 import Fp8
from moecomm.fused.gemm import multiply
from moecomm.fused.operands import Operands
from moecomm.fused.weight_format import PLAIN, WeightFormat, parts
from moecomm.fused.weights import deinterleave

log = logging.getLogger("moecomm")


def apply_experts(
    of: WeightFormat,
    x: torch.Tensor,
    w13: Any,
    w2: Any,
    tokens_per_expert: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    interleaved: bool = False,
    expected_rows: int | None = None,
    activation: GatedActivation = SWIGLU,
    biases: Biases = (None, None),
    lacks: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply gated experts to rows `[rows, H]`, grouped by expert; return `[rows, H]`.

    Rows after the last group are undefined.

    Args:
        of: the format of the weights.
        x: `[rows, H]`, rows of expert 0 first, then of expert 1, and so on.
        w13, w2, interleaved: as in moe(), as WeightFormat.check() returns them.
        tokens_per_expert: int32 `[E/R]`, rows of each expert.
        scales: of x, with weights in FP8 and INT8.
        dtype: of the result; default: that of x.
        expected_rows: see grouped_gemm.
        activation: between the GEMMs.
        biases: of the first GEMM, added before the activation, and of the second; None: none.
        lacks: WeightFormat.lacks_kernel(), if it is known.
        out: memory for the result, which torch's products do not write to; None: allocated.
    """
    how: dict[str, Any]
    dtype, counts, on_gpu = dtype or x.dtype, tokens_per_expert, x.is_cuda
    if lacks is None:
        lacks = of.lacks_kernel(x, w2)
    if lacks:
        say_once(of.slow, lacks)
    if of.packed > 1 and of.quantize is None and (lacks or not on_gpu):
        how = {"interleaved": interleaved, "expected_rows": expected_rows, "activation": activation, "biases": biases}
        wide = [of.widen(w, of.packed * w[0].shape[2]) for w in (w13, w2)]
        return apply_experts(PLAIN, x, wide[0], wide[1], counts, **how, out=out)
    if lacks:
        inner = multiply_by_torch((x, scales), w13, counts, dtype, interleaved, activation, biases[0])
        rows = of.cast(inner, x.dtype) if of.casts else inner
        return multiply_by_torch(rows, w2, counts, dtype, False, None, biases[1])
    data, of_data = (w2, None) if isinstance(w2, torch.Tensor) else (w2[0], w2[1])
    intermediate = (w13 if isinstance(w13, torch.Tensor) else w13[0]).shape[1] // 2
    inner, of_inner = x.new_empty(len(x), intermediate, dtype=of.product or dtype), None
    if of.product is not None and scales is not None:
        of_inner = scales.new_empty(len(x), -(-intermediate // GROUP))
    y = x.new_empty(len(x), data.shape[1], dtype=dtype) if out is None else out
    if not on_gpu:
        how = {"alignment": 1, "interleaved": interleaved}
        rows = x if scales is None else (x, scales)
        made = inner if of_inner is None else Fp8(inner, of_inner)
        if of.packed > 1:
            w13, w2 = of.widen(w13, x.shape[1]), of.widen(w2, intermediate)
        reference.grouped_gemm(rows, w13, counts, **how, activation=activation, out=made, bias=biases[0])
        rows = of.cast(inner, x.dtype) if of.casts else made
        reference.grouped_gemm(rows, w2, counts, **how, activation=None, out=y, bias=biases[1])
        return y
    expected = len(x) // len(data) if expected_rows is None else expected_rows
    first, of_first = (w13, None) if isinstance(w13, torch.Tensor) else (w13[0], w13[1])
    multiply(
        Operands(x, first, counts, scales, of_first, biases[0]), activation, interleaved, inner, of_inner, expected
    )
    if of.casts:
        inner, of_inner = of.cast(inner, x.dtype)
    multiply(Operands(inner, data, counts, of_inner, of_data, biases[1]), None, False, y, None, expected)
    return y


@lru_cache(maxsize=256)
def say_once(what: str, why: str) -> None:
    """Log a warning, once in a process for each reason."""
    log.warning(what, why)


def multiply_by_torch(
    rows: Any,
    w: Any,
    counts: torch.Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    activation: GatedActivation | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply by torch's grouped GEMM, which rounds sums to `dtype`, before they are multiplied by scales.

    Columns of the result may follow that are zeros, and rows may have such columns: torch wants 16 bytes.
    """
    (x, x_scales), (matrices, channels) = parts(rows), parts(w)
    ends, matrices = counts.cumsum(0, dtype=torch.int32), matrices.to(dtype)
    if interleaved:
        matrices = deinterleave(matrices)
        channels = None if channels is None else deinterleave(channels.unsqueeze(2)).squeeze(2)
    if activation is not None and (short := -(matrices.shape[1] // 2) % 8):
        matrices = torch.cat([pad(half, (0, 0, 0, short)) for half in matrices.chunk(2, dim=1)], dim=1)
        bias = None if bias is None else torch.cat([pad(half, (0, short)) for half in bias.chunk(2, dim=1)], dim=1)
    if (wider := x.shape[1] - matrices.shape[2]) > 0:
        matrices = pad(matrices, (0, wider))
    total = grouped_mm(x.to(dtype), matrices.transpose(1, 2), offs=ends)
    if x_scales is not None:
        groups = group_of_rows(ends, len(total)).clamp(max=len(ends) - 1)
        total = total.float() * (x_scales * channels[groups])
    total = add_bias(total, bias, ends)
    return (total if activation is None else activation.apply(*total.chunk(2, dim=-1))).to(dtype)
