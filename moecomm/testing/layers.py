"""Complete expert layers for tests: random inputs, the float64 result, and its error bound."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moecomm.base.choices import CombineWire
from moecomm.base.experts import experts_of
from moecomm.dispatch.reference import quantize
from moecomm.fused import Fp8, deinterleave, interleave, quantize_weights
from moecomm.fused.activations import FORMULAS, LIMIT, SWIGLU, UNLIMITED, GatedActivation, check_activation
from moecomm.testing import bounds
from moecomm.testing.cases import draw_routing

KINDS = ("plain", "plain", "drop", "duplicates", "one rank", "one expert", "nothing")
_FEW_PRODUCTS = 2**24  # products of one matrix, below which a CPU takes less time than the launches of a GPU


def selecting(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw matrices with at most one nonzero value a row and a column, a power of two with a sign.

    Products of rows with them are exact, so their bits depend neither on the number of rows nor on the processor.
    """
    matrices = torch.zeros(shape)
    most = min(shape[-2:])
    for matrix in matrices.flatten(0, -3):
        rows, columns = (torch.randperm(size, generator=generator)[:most] for size in shape[-2:])
        exponents = torch.randint(-1, 2, (most,), generator=generator)
        signs = torch.randint(0, 2, (most,), generator=generator) * 2.0 - 1
        matrix[rows, columns] = signs * torch.exp2(exponents.float())
    return matrices.to(dtype)


def activations(limit: float) -> dict[str, GatedActivation]:
    """Return activations of all kinds, by GatedActivation.kernel; those that can have a limit have this one."""
    limits = [(name, None) for name, formula in FORMULAS.items() if formula.limit in (None, UNLIMITED)]
    limited = [(name, limit) for name, formula in FORMULAS.items() if formula.limit is not None]
    found = [check_activation(name, one, None) for name, one in limits + limited]
    return {activation.kernel: activation for activation in found}


@dataclass
class LayerCase:
    """The inputs of one Buffer.moe on all ranks. Weights are those of all experts, gate rows before up rows."""

    seed: int
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor | None]
    bias: list[torch.Tensor | None]
    w13: torch.Tensor
    w2: torch.Tensor
    interleaved: bool
    wire: CombineWire | None
    fp8: bool = False  # weights are cast to FP8 before Buffer.moe
    activation: GatedActivation = SWIGLU
    w13_bias: torch.Tensor | None = None  # [E, 2 I]: gate columns before up columns
    w2_bias: torch.Tensor | None = None

    def call(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return the arguments of Buffer.moe on this rank."""
        own = experts_of(rank, len(self.w13), len(self.x))
        mine = slice(own.start, own.stop)
        tensors = {
            "x": self.x[rank],
            "topk_idx": self.topk_idx[rank],
            "topk_weights": self.topk_weights[rank],
            "bias": self.bias[rank],
        }
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        w13 = interleave(self.w13[mine]) if self.interleaved else self.w13[mine].contiguous()
        weights: dict[str, Any] = {"w13": w13.to(device), "w2": self.w2[mine].contiguous().to(device)}
        if self.fp8:
            weights = {name: quantize_weights(w) for name, w in weights.items()}
            if not self.interleaved and self.w2.shape[2] % bounds.GROUP > bounds.GROUP // 2:
                weights["w13"] = Fp8(weights["w13"].data, weights["w13"].scales.unsqueeze(1))
        for name, each in (("w13_bias", self.w13_bias), ("w2_bias", self.w2_bias)):
            if each is not None:
                weights[name] = each[mine].contiguous().to(device)
        if self.activation != SWIGLU:
            weights.update(self.activation.arguments())
        return {**moved, **weights, "interleaved": self.interleaved, "wire": self.wire}

    def matrices(self, expert: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return w13 (gate rows before up rows) and w2 of an expert in float64; with `fp8`, as after the cast."""
        w13, w2 = self.w13[expert].to(device), self.w2[expert].to(device)
        if not self.fp8:
            return w13.double(), w2.double()
        w13 = bounds.in_float64(quantize_weights(interleave(w13) if self.interleaved else w13), bounds.GROUP)
        return deinterleave(w13) if self.interleaved else w13, bounds.in_float64(quantize_weights(w2), bounds.GROUP)

    def check(self, rank: int, out: torch.Tensor) -> None:
        """Raise AssertionError, with the seed, unless `out` is within the bound of this rank's expected output."""
        few = self.topk_idx[rank].numel() * self.w2[0].numel() < _FEW_PRODUCTS
        want = expected(self, rank, "cpu" if few else out.device, made_on=out.device)
        assert out.shape == want.out.shape and out.dtype == self.x[rank].dtype, f"layer of seed {self.seed}"
        wrong = ~((out.to(want.out.device).double() - want.out).abs() <= want.bound)
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
    fp8: bool = False,
    experts: bool = False,
) -> LayerCase:
    """Draw the layer of a seed, on the CPU: ragged token counts (zero too), every kind of routing, every option.

    `experts`: draw an activation and biases of experts, too.
    """
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = [rng.choice([0, 1, max_tokens, rng.randint(0, max_tokens)]) for _ in range(ranks)]
    kind, bias = rng.choice(KINDS), rng.choice(["none", "none", "rows", "one"])
    idx = draw_routing(kind, tokens, ranks, num_experts, topk, rng, g)
    id_type = rng.choice([torch.int64, torch.int32])

    def drawn(*shape: int, scale: float = 1) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    drawing: dict[str, Any] = {}
    if experts:
        of_experts = random.Random(seed)
        limit = of_experts.choice([LIMIT, 0.5])  # one of few values, and one of many
        drawing["activation"] = of_experts.choice(list(activations(limit).values()))
        more = torch.Generator().manual_seed(seed + 1)
        for name, columns in (("w13_bias", 2 * intermediate), ("w2_bias", hidden)):
            bias_type = of_experts.choice([None, dtype, torch.float32])
            values = torch.randn(num_experts, columns, generator=more)
            drawing[name] = None if bias_type is None else values.to(bias_type)
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
        fp8=fp8,
        **drawing,
    )


class Expected(NamedTuple):
    """The layer's output in float64 `[T, H]`, and the error bound of each value."""

    out: torch.Tensor
    bound: torch.Tensor


def expected(
    case: LayerCase, rank: int, device: torch.device | str = "cpu", made_on: torch.device | None = None
) -> Expected:
    """Compute the expected output of Buffer.moe on one rank.

    The bound follows the values through the layer (moecomm.testing.bounds): sums and silu; rounding to the dtype of
    SwiGLU's result, of each expert's row, of each rank's reduced row if `wire` is given, and of the output. In FP8, x
    and the weights are the values after their casts, and SwiGLU's result is rounded to bfloat16 and then cast.

    Args:
        case: the layer.
        rank: the rank whose output is computed.
        device: where the float64 result is computed.
        made_on: the device that ran Buffer.moe; default: `device`.
    """
    x, ids, dtype = case.x[rank].to(device).double(), case.topk_idx[rank].to(device), case.x[rank].dtype
    weights = case.topk_weights[rank]
    weights = torch.ones(ids.shape, device=device) if weights is None else weights.to(device)
    rounding, unit = torch.finfo(dtype).eps / 2, bounds.UNIT
    smallest = torch.finfo(dtype).smallest_normal * rounding + 2.0**-126
    rows = bounds.in_float64(Fp8(*(part.to(device) for part in quantize(case.x[rank]))), 1) if case.fp8 else x
    fp8_on = made_on or torch.device(device) if case.fp8 else None

    out, off, magnitude = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        token, k = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = case.matrices(expert, device)
        exact = torch.zeros_like(rows[token])
        first, second = (None if each is None else each[expert].to(device) for each in (case.w13_bias, case.w2_bias))
        both = bounds.product(rows[token], exact, w13, bounds.lost_by_sums(w13.shape[1], fp8_on))
        inner, inner_off = bounds.gated(*bounds.biased(*both, first), case.activation)
        inner_off = bounds.rounded(inner, inner_off, torch.bfloat16 if case.fp8 else dtype)
        if case.fp8:
            inner_off = bounds.cast(inner, inner_off)
        y, y_off = bounds.product(inner, inner_off, w2, bounds.lost_by_sums(w2.shape[1], fp8_on))
        y, y_off = bounds.biased(y, y_off, second)
        y_off = bounds.rounded(y, y_off, dtype)
        scale = weights[token, k].double().unsqueeze(1)
        out.index_add_(0, token, scale * y)
        off.index_add_(0, token, scale.abs() * y_off)
        magnitude.index_add_(0, token, scale.abs() * (y.abs() + y_off))
    if (bias := case.bias[rank]) is not None:
        out += bias.to(device).double()
        magnitude += bias.to(device).double().abs()
    off += (2 * ids.shape[1] + 2) * unit * magnitude  # one product and one sum for each expert, and the bias
    if case.wire not in (None, "rows"):
        off += rounding * magnitude + ids.shape[1] * smallest
    return Expected(out, bounds.rounded(out, off, dtype))
