"""What a grouped GEMM computes, in a few lines of torch.  CPUs run this."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

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


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """See moecomm.fused.grouped_gemm: sums and activation in float32, rounded once."""
    rows, results = x.flatten(0, -2), out.flatten(0, -2)
    for matrix, group in zip(w, groups_of(x, tokens_per_expert.tolist(), alignment), strict=True):
        if activation == "swiglu":
            w13 = deinterleave(matrix) if interleaved else matrix
            gate, up = (rows[group].float() @ w13.float().T).chunk(2, dim=-1)
            results[group] = (silu(gate) * up).to(out.dtype)
        else:
            results[group] = (rows[group].float() @ matrix.float().T).to(out.dtype)
    return out
