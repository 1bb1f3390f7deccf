"""What a grouped GEMM computes, in a few lines of torch.  CPUs run this."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from moecomm.dispatch.reference import GROUP, quantize
from moecomm.fused.fp8 import Fp8, Operand, widen
from moecomm.fused.weights import deinterleave


def groups_of(x: torch.Tensor, counts: list[int], alignment: int) -> list[slice]:
    """Where the rows of each group lie in x, seen as `[rows, K]`; a group with no room left for it is cut or empty."""
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
    w: Operand,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    out: torch.Tensor | Fp8,
) -> None:
    """See moecomm.fused.grouped_gemm: sums and activation in float32, rounded once; FP8 is widened before.  Whatever
    autocast says, which would round what is multiplied.
    """
    wide = x if isinstance(x, torch.Tensor) else widen(*x, 1)
    result = out if isinstance(out, torch.Tensor) else out.data
    rows, results = wide.flatten(0, -2), result.flatten(0, -2)
    for group, begin_end in enumerate(groups_of(wide, tokens_per_expert.tolist(), alignment)):
        matrix = w[group].float() if isinstance(w, torch.Tensor) else widen(w[0][group], w[1][group], GROUP)
        if activation and interleaved:
            matrix = deinterleave(matrix)
        with torch.autocast(matrix.device.type, enabled=False):
            product = rows[begin_end].float() @ matrix.T
        if activation == "swiglu":
            gate, up = product.chunk(2, dim=-1)
            product = silu(gate) * up
        if isinstance(out, Fp8):
            data, scales = quantize(product.bfloat16())
            results.view(torch.uint8)[begin_end] = data.view(torch.uint8)
            out.scales.flatten(0, -2)[begin_end] = scales
        else:
            results[begin_end] = product.to(result.dtype)
