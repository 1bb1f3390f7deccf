"""How far off a right answer may be: bounds that follow values through a layer, all in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

GROUP = 128  # columns of e4m3 that share a scale
UNIT = 2.0**-23
# How far off a sum of 128 products of e4m3 is, over the sum of their absolute values.  Tensor cores add 32 products and
# what is there by the largest exponent, and keep 13 bits below it: 33 values, 4 times, each off by up to 2^-13 of the
# largest.
TENSOR_CORES = 4 * 33 * 2.0**-13

Value = tuple[torch.Tensor, torch.Tensor]  # and how far off it is


def lost_by_sums(columns: int, fp8_on: torch.device | None = None) -> float:
    """What a float32 sum of so many products is off by, over the sum of their absolute values.

    Tensor cores drop what is below the largest term's last place.  `fp8_on`: the device, where they are of e4m3: scales
    are multiplied as well, and there is TENSOR_CORES.
    """
    if fp8_on is None:
        return 2 * columns * UNIT
    return 2 * (columns + 2) * UNIT + (TENSOR_CORES if fp8_on.type == "cuda" else 0.0)


def product(rows: torch.Tensor, off: torch.Tensor, w: torch.Tensor, lost: float) -> Value:
    """rows `[T, K]` times w `[N, K]`; `lost`: see lost_by_sums."""
    return rows @ w.T, (off + lost * (rows.abs() + off)) @ w.abs().T


def gated(both: torch.Tensor, off: torch.Tensor) -> Value:
    """silu(gate) * up, of gate and up side by side.

    silu changes at most 1.1 times as fast as what it is of; __expf is good to 2^-16, and __fdividef says 0 of a divisor
    beyond 2^126 = exp(87.3).
    """
    (gate, up), (gate_off, up_off) = both.chunk(2, -1), off.chunk(2, -1)
    value = silu(gate) * up
    lost = 1.1 * gate_off * (up.abs() + up_off) + silu(gate).abs() * up_off
    return value, lost + torch.where(gate < -87, 1, 2.0**-16) * value.abs()


def rounded(value: torch.Tensor, off: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far off a value is once it has been rounded to nearest."""
    rounding = torch.finfo(dtype).eps / 2
    return off + rounding * (value.abs() + off) + torch.finfo(dtype).smallest_normal * rounding + 2.0**-126


def cast(value: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """How far off rows are once they have been cast to e4m3, one scale for 128 columns.

    Half a unit in the last of 4 bits; of what is small beside the largest, half of the least step there is.
    """
    rows, columns = value.shape
    largest = torch.zeros(rows, -(-columns // GROUP) * GROUP, dtype=value.dtype, device=value.device)
    largest[:, :columns] = value.abs() + off
    scale = largest.view(rows, -1, GROUP).amax(dim=2).clamp(min=1e-4) / 448
    least = scale.repeat_interleave(GROUP, dim=1)[:, :columns] * 2.0**-10
    return off + torch.maximum(2.0**-4 * (value.abs() + off), least) * (1 + 2.0**-20)
