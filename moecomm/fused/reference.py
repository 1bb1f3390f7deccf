"""Reference of the grouped GEMM in plain torch; also its CPU implementation."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.dispatch.reference import GROUP, quantize
from moecomm.fused.activations import GatedActivation
from moecomm.fused.fp8 import Fp8, Operand, widen
from moecomm.fused.weights import deinterleave


def groups_of(x: torch.Tensor, counts: list[int], alignment: int) -> list[slice]:
    """Return the rows of each group in x, viewed as `[rows, K]`.  Groups that exceed the room are cut, or empty."""
    rows, begin, found = x.shape[:-1].numel(), 0, []
    for group, count in enumerate(counts):
        room = rows
        if x.dim() == 3:
            begin, room = group * x.shape[1], (group + 1) * x.shape[1]
        end = min(begin + max(count, 0), room)
        found.append(slice(min(begin, end), end))
        begin = -(-end // alignment) * alignment
    return found


@torch.no_grad()
def grouped_gemm(
    x: Operand,
    w: Any,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int,
    activation: GatedActivation | None,
    interleaved: bool,
    out: torch.Tensor | Fp8,
    bias: torch.Tensor | None = None,
) -> None:
    """Compute moecomm.fused.grouped_gemm on CPUs: everything in float32, with one rounding at the end.

    FP8 operands are widened to float32 first.  Autocast is disabled, because it would round the operands.
    """
    weights, w_scales = w if isinstance(w, tuple) else (w, None)
    result, out_scales = out if isinstance(out, tuple) else (out, None)
    by_channel = w_scales is not None and w_scales.dim() < 3
    wide = x if isinstance(x, torch.Tensor) else x[0] if by_channel else widen(*x, 1)
    rows, results = wide.flatten(0, -2), result.flatten(0, -2)
    for group, begin_end in enumerate(groups_of(wide, tokens_per_expert.tolist(), alignment)):
        matrix = weights[group]
        if w_scales is not None and not by_channel:
            matrix = widen(matrix, w_scales[group], GROUP)
        else:
            matrix = matrix.double() if matrix.dtype is torch.int8 else matrix.float()  # sums of INT8 are exact
        if activation and interleaved:
            matrix = deinterleave(matrix)
        with torch.autocast(matrix.device.type, enabled=False):
            product = rows[begin_end].to(matrix.dtype) @ matrix.T
        if by_channel:
            channels = w_scales[group]
            if activation and interleaved:
                channels = deinterleave(channels.unsqueeze(1)).squeeze(1)
            product = product.float() * (x[1].flatten(0, -2)[begin_end] * channels)
        if bias is not None:
            product = product + bias[group].float()
        if activation is not None:
            product = activation.apply(*product.chunk(2, dim=-1))
        if out_scales is not None:
            data, scales = quantize(product.bfloat16())
            results.view(torch.uint8)[begin_end] = data.view(torch.uint8)
            out_scales.flatten(0, -2)[begin_end] = scales
        else:
            results[begin_end] = product.to(result.dtype)
