"""An MoE layer in plain torch over a Buffer, the example to copy; and the same layer on a single rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from moecomm.buffer import Buffer
from moecomm.core.choices import Layout
from moecomm.routed import Routed
from moecomm.router import Router, drawn


class MoELayer(torch.nn.Module):
    """Router, Buffer and this rank's experts.  Collective: every rank calls forward, with the tokens it has.

    `w13` [E/R, 2 I, H] (gate and up projections) and `w2` [E/R, H, I]; experts compute in their dtype.  For
    inference: moecomm's rounds have no gradients here.
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
        """[T, H] -> [T, H]."""
        topk_idx, topk_weights = self.router(x)
        # These experts loop on the host: wait for exactly the rows that arrived.
        routed = self.buffer.dispatch(x, topk_idx, topk_weights, layout=self.layout, sync=True)
        out: torch.Tensor = self.buffer.combine(self.experts(routed), routed.handle)
        return out

    def experts(self, routed: Routed) -> torch.Tensor:
        """The rows of `routed.x` through their experts, in the same shape and dtype."""
        compute = {"flat": flat_experts, "expert": grouped_experts, "batched": batched_experts}[self.layout]
        return compute(routed, self.w13, self.w2)


def swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """One expert, in the dtype of its weights: w2 (silu(w1 x) * w3 x).  Rows [n, H] -> [n, H]."""
    gate, up = linear(x.to(w13.dtype), w13).chunk(2, dim=-1)
    return linear(silu(gate) * up, w2)


def flat_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """`flat`: one row a token, whose experts here are weighted and added up; combine adds over ranks."""
    assert routed.topk_idx is not None and routed.topk_weights is not None
    y = torch.zeros(routed.x.shape, dtype=w2.dtype, device=w2.device)
    for expert in range(len(w13)):
        row, k = torch.nonzero(routed.topk_idx == expert, as_tuple=True)
        y.index_add_(0, row, swiglu(routed.x[row], w13[expert], w2[expert]) * routed.topk_weights[row, k].unsqueeze(1))
    return y.to(routed.x.dtype)


def grouped_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """`expert`: one group of rows an expert; combine applies the weights."""
    y = torch.empty_like(routed.x)
    start = 0
    for expert, count in enumerate(routed.tokens_per_expert.tolist()):
        rows = slice(start, start + count)
        y[rows] = swiglu(routed.x[rows], w13[expert], w2[expert])
        start += count
    return y


def batched_experts(routed: Routed, w13: torch.Tensor, w2: torch.Tensor, at_once: int = 8) -> torch.Tensor:
    """`batched`: [E/R, rows, H], valid rows first: a product for `at_once` experts, as long as the fullest of them."""
    y = torch.empty_like(routed.x)
    parts = zip(*(torch.split(t, at_once) for t in (routed.x, y, w13, w2, routed.tokens_per_expert)), strict=True)
    for x, out, some_w13, some_w2, counts in parts:
        n = int(counts.max())
        gate, up = torch.bmm(x[:, :n].to(w13.dtype), some_w13.transpose(1, 2)).chunk(2, dim=2)
        out[:, :n] = torch.bmm(silu(gate) * up, some_w2.transpose(1, 2))
    return y


class Reference(NamedTuple):
    """float32 [T, H]: the layer's output, never rounded to a payload's dtype, and the sum of absolute values in it."""

    out: torch.Tensor
    magnitude: torch.Tensor


def reference(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Reference:
    """The layer on one rank: sum over k of w_k * expert_k(x).  `experts`: (w13, w2) of each expert, one at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    magnitude = torch.zeros_like(out)
    for expert, (w13, w2) in enumerate(experts):
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        term = swiglu(x[token], w13, w2).float() * topk_weights[token, k].unsqueeze(1)
        out.index_add_(0, token, term)
        magnitude.index_add_(0, token, term.abs())
    return Reference(out, magnitude)


def error_bound(expected: Reference, dtype: torch.dtype) -> torch.Tensor:
    """How far from `expected` the layer may be, element by element, with experts in float32 and rows in `dtype`.

    Two roundings to `dtype`, each of at most half its epsilon: every expert's (or rank's) row before it travels home,
    together within `magnitude`, and the result.  Besides, float32 sums of H terms in another order: they differ by
    some roundings of 2^-24 of terms sqrt(H) times as large as their sum, so 16 * 2^-24 * sqrt(H) of a row's largest
    value.
    """
    unit = float(torch.finfo(dtype).eps) / 2
    reordering = float(16 * 2**-24 * expected.out.shape[1] ** 0.5)
    order = reordering * expected.magnitude.amax(dim=1, keepdim=True)
    return unit * (expected.magnitude * (1 + unit) + expected.out.abs()) + order


def expert_weights(
    expert: int,
    hidden: int,
    intermediate: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [2 I, H], w2 [H, I]) of one expert, drawn from `seed`: the same on whichever rank asks."""
    generator = torch.Generator().manual_seed(int(seed) * 1_000_003 + expert)
    w13 = drawn(generator, 2 * intermediate, hidden) / hidden**0.5
    w2 = drawn(generator, hidden, intermediate) / intermediate**0.5
    return w13.to(device=device, dtype=dtype), w2.to(device=device, dtype=dtype)
