"""A whole layer in plain torch on one rank, in float64: its gradients, and how far off right ones may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from moecomm.fused import interleave
from moecomm.testing import LayerCase


def formula(
    x: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu,
) -> torch.Tensor:
    """Every token through every expert; then the chosen ones."""
    gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", activation(gate) * up, w2)
    chosen = y.gather(1, idx.clamp(min=0).unsqueeze(2).expand(-1, -1, x.shape[1]))
    return (chosen * torch.where(idx >= 0, weights, 0.0).unsqueeze(2)).sum(dim=1)


def above_silu(magnitude: torch.Tensor) -> torch.Tensor:
    """Bound silu of sums with terms of this magnitude: no less than what silu gives, with a slope no less than silu's
    (1.1 at most), even where the sum is rounded (a slope of silu's slope is 0.5 at most).
    """
    return 1.1 * magnitude + 0.25 * magnitude.square()


def seen_by(case: LayerCase) -> list[torch.Tensor]:
    """Return what outputs are multiplied with before they are added up."""
    g = torch.Generator().manual_seed(case.seed + 100)
    return [torch.randn(x.shape, generator=g).to(x.dtype) for x in case.x]


def wanting(call: dict[str, Any], *names: str) -> dict[str, Any]:
    """A call of ops.moe with leaves of its own; gradients of what is named, or of all."""
    floating = ("x", "topk_weights", "w13", "w2", "bias")
    return {
        name: value.clone().requires_grad_(name in (names or floating))
        if name in floating and value is not None
        else value
        for name, value in call.items()
    }


def grads_of(out: torch.Tensor, call: dict[str, Any], seen: torch.Tensor) -> dict[str, torch.Tensor]:
    """By name, those that are wanted."""
    leaves = {name: t for name, t in call.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), seen), strict=True))


def gradients(case: LayerCase, seen: list[torch.Tensor]) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Differentiate the sum of out * seen on each rank: name -> the gradient, and how far off one of the dtype may be.

    A value is a sum of products; with n roundings on the way to any of them it is off by n of the magnitude of all
    that is added up.  That magnitude is the same gradient of a layer without signs.
    """
    ids = torch.cat(case.topk_idx).long()
    weights = [torch.ones(i.shape) if w is None else w for i, w in zip(case.topk_idx, case.topk_weights, strict=True)]
    leaves = [t.double() for t in (torch.cat(case.x), torch.cat(weights), case.w13, case.w2)]

    def pulled_back(activation: Any, leaves: list[torch.Tensor], seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, w13, w2 = (leaf.requires_grad_() for leaf in leaves)
        return torch.autograd.grad(formula(x, ids, w, w13, w2, activation), (x, w, w13, w2), seen)

    whole = torch.cat(seen).double()
    want = pulled_back(silu, [leaf.clone() for leaf in leaves], whole)
    size = pulled_back(above_silu, [leaf.abs() for leaf in leaves], whole.abs())
    dtype, (hidden, inner) = case.x[0].dtype, case.w2.shape[1:]
    # Sums one after the other: over H forward and over H backward, over 2 I, over a token's or an expert's rows; less
    # than 20 products and functions.  What is not float32 is rounded to less than 10 times.
    off = (2 * hidden + 2 * inner + ids.numel() + 20) * 2.0**-24
    off += 0 if dtype is torch.float32 else 10 * torch.finfo(dtype).eps / 2
    tokens, local = [len(x) for x in case.x], len(case.w13) // len(case.x)
    cuts = (tokens, tokens, local, local)
    parts = [(w.split(cut), (off * s).split(cut)) for w, s, cut in zip(want, size, cuts, strict=True)]
    found = []
    for rank, bias in enumerate(case.bias):
        mine = {
            name: (values[rank], bounds[rank])
            for name, (values, bounds) in zip(("x", "topk_weights", "w13", "w2"), parts, strict=True)
        }
        if case.interleaved:
            mine["w13"] = interleave(mine["w13"][0]), interleave(mine["w13"][1])
        if case.topk_weights[rank] is None:
            del mine["topk_weights"]
        if bias is not None:
            here = seen[rank].double() if bias.ndim == 2 else seen[rank].double().sum(dim=0)
            mine["bias"] = here, off * (here.abs() if bias.ndim == 2 else seen[rank].double().abs().sum(dim=0))
        found.append(mine)
    return found


def check(got: dict[str, torch.Tensor], want: dict[str, tuple[torch.Tensor, torch.Tensor]], where: str) -> None:
    """Raises AssertionError, saying where, for a gradient that is not right."""
    for name, (value, bound) in want.items():
        assert got[name].shape == value.shape, f"{name}, {where}"
        wrong = ~((got[name].double().cpu() - value).abs() <= bound)
        assert not wrong.any(), f"{name}, {where}: {int(wrong.sum())} of {wrong.numel()} values"
