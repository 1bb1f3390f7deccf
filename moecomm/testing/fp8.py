"""FP8 for tests: what products of e4m3 with scales are in float64, and how far off a right answer may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import silu

from moecomm.fused import Fp8, deinterleave
from moecomm.fused.fp8 import widen
from moecomm.fused.reference import groups_of

_GROUP = 128
# How far off a sum of 128 products is, over the sum of their absolute values.  Tensor cores add 32 products and what is
# there by the largest exponent, and keep 13 bits below it: 33 values, 4 times, each off by up to 2^-13 of the largest.
TENSOR_CORES = 4 * 33 * 2.0**-13


def product(
    rows: torch.Tensor, off: torch.Tensor, w: torch.Tensor, on_tensor_cores: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [T, K] times w [N, K], both in float64, and how far off that is, of rows that are `off`.

    Beside what tensor cores lose: data * scale, and sums of K products in float32.
    """
    lost = 2 * (w.shape[1] + 2) * 2.0**-23 + (TENSOR_CORES if on_tensor_cores else 0.0)
    return rows @ w.T, (off + lost * (rows.abs() + off)) @ w.abs().T


def gated(
    gate: torch.Tensor, gate_off: torch.Tensor, up: torch.Tensor, up_off: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up, and how far off that is.

    silu changes at most 1.1 times as fast as what it is of; __expf is good to 2^-16, and __fdividef says 0 of a divisor
    beyond 2^126 = exp(87.3).
    """
    both = silu(gate) * up
    off = 1.1 * gate_off * (up.abs() + up_off) + silu(gate).abs() * up_off
    return both, off + torch.where(gate < -87, 1, 2.0**-16) * both.abs()


def rounded(value: torch.Tensor, off: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far off a value is once it has been rounded."""
    rounding = torch.finfo(dtype).eps / 2
    return off + rounding * (value.abs() + off) + torch.finfo(dtype).smallest_normal * rounding + 2.0**-126


def off_by_scales(value: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """How far off rows are once they have been cast to e4m3, one scale for 128 columns: half a unit in the last of 4
    bits, or, of what is small beside the largest, half of the least step there is."""
    rows, columns = value.shape
    largest = torch.zeros(rows, -(-columns // _GROUP) * _GROUP, dtype=value.dtype, device=value.device)
    largest[:, :columns] = value.abs() + off
    scale = largest.view(rows, -1, _GROUP).amax(dim=2).clamp(min=1e-4) / 448
    least = scale.repeat_interleave(_GROUP, dim=1)[:, :columns] * 2.0**-10
    return off + torch.maximum(2.0**-4 * (value.abs() + off), least) * (1 + 2.0**-20)


def widened(
    x: Fp8,
    w: Fp8,
    counts: Sequence[int],
    *,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    dtype: torch.dtype,
    on_tensor_cores: bool,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each expert's rows: where they lie, what a grouped GEMM makes of them, and how far off that may be."""
    rows = widen(x.data.double(), x.scales.double(), 1).flatten(0, -2)
    for group, place in enumerate(groups_of(x.data, list(counts), alignment)):
        matrix = widen(w.data[group].double(), w.scales[group].double(), _GROUP)
        if activation and interleaved:
            matrix = deinterleave(matrix)
        want, off = product(rows[place], torch.zeros_like(rows[place]), matrix, on_tensor_cores)
        if activation:
            (gate, up), (gate_off, up_off) = want.chunk(2, -1), off.chunk(2, -1)
            want, off = gated(gate, gate_off, up, up_off)
        yield place, want, rounded(want, off, dtype)
