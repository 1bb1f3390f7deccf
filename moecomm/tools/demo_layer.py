"""An MoE layer in plain torch over a Buffer, an example to copy; and the same layer on a single rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from moecomm.base.choices import Layout
from moecomm.buffer import Buffer
from moecomm.dispatch.routed import Routed
from moecomm.router import Router


class MoELayer(torch.nn.Module):
    """Router, Buffer and the experts of this rank. Collective: every rank calls forward, with its own tokens.

    For inference: dispatch and combine have no gradients here. Experts compute in the dtype of their weights.

    Args:
        router: returns top-k expert ids and weights for rows [T, H].
        buffer: the Buffer of all ranks.
        w13: gate and up projections [E/R, 2 I, H] of this rank's experts.
        w2: down projections [E/R, H, I] of this rank's experts.
        layout: layout of dispatch: "flat", "expert" or "batched".
    """

    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(
        self, router: Router, buffer: Buffer, w13: torch.Tensor, w2: torch.Tensor, *, layout: Layout = "expert"
    ) -> None:
        super().__init__()
        self.router, self.buffer, self.layout = router, buffer, layout
        self.register_buffer("w13", w13)
        self.register_buffer("w2", w2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer, [T, H], for the tokens [T, H] of this rank."""
        topk_idx, topk_weights = self.router(x)
        # These experts loop on the host, so dispatch waits until the exact number of rows is known.
        routed = self.buffer.dispatch(x, topk_idx, topk_weights, layout=self.layout, sync=True)
        out: torch.Tensor = self.buffer.combine(self.experts(routed), routed.handle)
        return out

    def experts(self, routed: Routed) -> torch.Tensor:
        """Apply this rank's experts to the rows of `routed.x`; the result has the same shape and dtype."""
        compute = {"flat": flat_experts, "expert": grouped_experts, "batched": batched_experts}[self.layout]
        return compute(routed, self.w13, self.w2)


def swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Apply one expert, w2 (silu(w1 x) * w3 x), in the dtype of its weights. Rows [n, H] -> [n, H]."""
    gate, up = linear(x.to(w13.dtype), w13).chunk(2, dim=-1)
    return linear(silu(gate) * up, w2)


def flat_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Experts for layout `flat`: each row becomes the weighted sum over its local experts; combine adds over ranks."""
    assert routed.topk_idx is not None and routed.topk_weights is not None
    y = torch.zeros(routed.x.shape, dtype=w2.dtype, device=w2.device)
    for expert in range(len(w13)):
        row, k = torch.nonzero(routed.topk_idx == expert, as_tuple=True)
        y.index_add_(0, row, swiglu(routed.x[row], w13[expert], w2[expert]) * routed.topk_weights[row, k].unsqueeze(1))
    return y.to(routed.x.dtype)


def grouped_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Experts for layout `expert`: one contiguous group of rows for each expert; combine applies the weights."""
    y = torch.empty_like(routed.x)
    start = 0
    for expert, count in enumerate(routed.tokens_per_expert.tolist()):
        rows = slice(start, start + count)
        y[rows] = swiglu(routed.x[rows], w13[expert], w2[expert])
        start += count
    return y


def batched_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor, at_once: int = 8) -> torch.Tensor:
    """Experts for layout `batched`: [E/R, rows, H], valid rows first.

    Multiplies `at_once` experts in one batched product, which covers the rows of the fullest of these experts.
    """
    y = torch.empty_like(routed.x)
    parts = zip(*(torch.split(t, at_once) for t in (routed.x, y, w13, w2, routed.tokens_per_expert)), strict=True)
    for x, out, some_w13, some_w2, counts in parts:
        n = int(counts.max())
        gate, up = torch.bmm(x[:, :n].to(w13.dtype), some_w13.transpose(1, 2)).chunk(2, dim=2)
        out[:, :n] = torch.bmm(silu(gate) * up, some_w2.transpose(1, 2))
    return y


class Reference(NamedTuple):
    """Output of the single-rank layer in float32 [T, H], without rounding to the payload, and the sum of |terms|."""

    out: torch.Tensor
    magnitude: torch.Tensor


def reference(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Reference:
    """Compute the layer on one rank: the sum over k of w_k * expert_k(x).

    Args:
        x: tokens [T, H].
        topk_idx: expert ids [T, K].
        topk_weights: weights [T, K].
        experts: (w13, w2) of each expert in order; an iterator holds one expert at a time in memory.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    magnitude = torch.zeros_like(out)
    for expert, (w13, w2) in enumerate(experts):
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        term = swiglu(x[token], w13, w2).float() * topk_weights[token, k].unsqueeze(1)
        out.index_add_(0, token, term)
        magnitude.index_add_(0, token, term.abs())
    return Reference(out, magnitude)


def error_bound(expected: Reference, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest allowed |output - expected| of each element, for experts in float32 and rows in `dtype`.

    Three roundings to `dtype` count, each of at most half its epsilon: the row of every expert before combine, each
    rank's sum of them (both in total within `magnitude`), and the result. In addition float32 sums of H terms may run
    in another order. They differ by a few roundings of 2^-24 of terms that are sqrt(H) times as large as their sum:
    16 * 2^-24 * sqrt(H) of a row's largest value.
    """
    unit = float(torch.finfo(dtype).eps) / 2
    reordering = float(16 * 2**-24 * expected.out.shape[1] ** 0.5)
    order = reordering * expected.magnitude.amax(dim=1, keepdim=True)
    before = expected.magnitude * ((1 + unit) ** 2 - 1)
    return before * (1 + unit) + unit * expected.out.abs() + order
