"""Whole expert layers for tests: random ones, what they are in float64, and how far off a right answer may be."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from moecomm.fused import interleave
from moecomm.testing.cases import draw_routing

KINDS = ("plain", "plain", "drop", "duplicates", "one rank", "one expert", "nothing")


@dataclass
class LayerCase:
    """One Buffer.moe of all ranks.  Weights are those of all experts, gate rows before up rows."""

    seed: int
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor | None]
    bias: list[torch.Tensor | None]
    w13: torch.Tensor
    w2: torch.Tensor
    interleaved: bool
    wire: torch.dtype | None

    def call(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of Buffer.moe on this rank."""
        local = len(self.w13) // len(self.x)
        mine = slice(rank * local, (rank + 1) * local)
        tensors = {
            "x": self.x[rank],
            "topk_idx": self.topk_idx[rank],
            "topk_weights": self.topk_weights[rank],
            "bias": self.bias[rank],
            "w13": interleave(self.w13[mine]) if self.interleaved else self.w13[mine].contiguous(),
            "w2": self.w2[mine].contiguous(),
        }
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        return {**moved, "interleaved": self.interleaved, "wire": self.wire}

    def check(self, rank: int, out: torch.Tensor) -> None:
        """Raises AssertionError, naming the seed, unless `out` is what this rank must get."""
        want = expected(self, rank, out.device)
        assert out.shape == want.out.shape and out.dtype == self.x[rank].dtype, f"layer of seed {self.seed}"
        wrong = ~((out.double() - want.out).abs() <= want.bound)
        assert not bool(wrong.any()), (
            f"layer of seed {self.seed}, rank {rank}: {int(wrong.sum())} of {wrong.numel()} values, first at "
            f"{wrong.nonzero()[0].tolist()}"
        )


def random_layer(
    seed: int,
    *,
    ranks: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dtype: torch.dtype,
) -> LayerCase:
    """The layer of a seed, on the CPU: ragged token counts (zero too), every kind of routing, every option."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = [rng.choice([0, 1, max_tokens, rng.randint(0, max_tokens)]) for _ in range(ranks)]
    kind, bias = rng.choice(KINDS), rng.choice(["none", "none", "rows", "one"])
    idx = draw_routing(kind, tokens, ranks, num_experts, topk, rng, g)
    id_type = rng.choice([torch.int64, torch.int32])

    def drawn(*shape: int, scale: float = 1) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    return LayerCase(
        seed=seed,
        x=[drawn(t, hidden) for t in tokens],
        topk_idx=[ids.to(id_type) for ids in idx],
        topk_weights=[torch.rand(t, topk, generator=g) if rng.random() < 0.8 else None for t in tokens],
        bias=[None if bias == "none" else drawn(*((t,) if bias == "rows" else ()), hidden) for t in tokens],
        w13=drawn(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        w2=drawn(num_experts, hidden, intermediate, scale=intermediate**-0.5),
        interleaved=intermediate % 8 == 0 and rng.random() < 0.3,
        wire=rng.choice([None, None, dtype]),
    )


class Expected(NamedTuple):
    """float64 `[T, H]`: the layer's output, and how far from it each value may be."""

    out: torch.Tensor
    bound: torch.Tensor


def expected(case: LayerCase, rank: int, device: torch.device | str = "cpu") -> Expected:
    """What Buffer.moe is to return on this rank.

    The bound follows the values through the layer: float32 sums of n products are off by at most 2 n units of 2^-23 of
    the sum of their absolute values (tensor cores drop what is below the largest term's last place), silu by 2^-16 and
    by 1.1 times what its argument is off by; SwiGLU's result, each expert's row, with `wire` each rank's sum, and the
    output are rounded to the dtype.
    """
    x, ids = case.x[rank].to(device).double(), case.topk_idx[rank].to(device)
    weights = case.topk_weights[rank]
    weights = torch.ones(ids.shape, device=device) if weights is None else weights.to(device)
    rounding, unit = torch.finfo(case.x[rank].dtype).eps / 2, 2.0**-23
    smallest = torch.finfo(case.x[rank].dtype).smallest_normal * rounding + 2.0**-126

    def rounded(value: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        return off + rounding * (value.abs() + off) + smallest

    def product(rows: torch.Tensor, off: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows @ w.T, (off + 2 * len(w.T) * unit * (rows.abs() + off)) @ w.abs().T

    out, off, magnitude = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        token, k = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = (w[expert].to(device).double() for w in (case.w13, case.w2))
        both, both_off = product(x[token], torch.zeros_like(x[token]), w13)
        (gate, up), (gate_off, up_off) = both.chunk(2, -1), both_off.chunk(2, -1)
        inner = silu(gate) * up
        inner_off = 1.1 * gate_off * (up.abs() + up_off) + silu(gate).abs() * up_off
        inner_off = rounded(inner, inner_off + torch.where(gate < -87, 1, 2.0**-16) * inner.abs())
        y, y_off = product(inner, inner_off, w2)
        y_off = rounded(y, y_off)
        scale = weights[token, k].double().unsqueeze(1)
        out.index_add_(0, token, scale * y)
        off.index_add_(0, token, scale.abs() * y_off)
        magnitude.index_add_(0, token, scale.abs() * (y.abs() + y_off))
    if (bias := case.bias[rank]) is not None:
        out += bias.to(device).double()
        magnitude += bias.to(device).double().abs()
    off += (2 * ids.shape[1] + 2) * unit * magnitude  # a product and a sum an entry, and the bias
    if case.wire is not None:
        off += rounding * magnitude + ids.shape[1] * smallest
    return Expected(out, rounded(out, off))
