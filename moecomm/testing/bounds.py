"""Error bounds of correct answers, followed through a layer in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import silu

from moecomm.fused import Fp8, deinterleave
from moecomm.fused.activations import FORMULAS, SWIGLU, GatedActivation
from moecomm.fused.fp8 import widen
from moecomm.fused.reference import groups_of

GROUP = 128  # columns of e4m3 that share a scale
UNIT = 2.0**-23
# Largest error of a sum of 128 products of e4m3 over the sum of their absolute values. Tensor cores add 32 products to
# the accumulator at once, aligned to the largest exponent, and keep 13 bits below it: 33 values, 4 times, each off by
# up to 2^-13 of the largest.
TENSOR_CORES = 4 * 33 * 2.0**-13

Value = tuple[torch.Tensor, torch.Tensor]  # a value, and the bound of its error


def lost_by_sums(columns: int, fp8_on: torch.device | None = None) -> float:
    """Return the error of a float32 sum of `columns` products, over the sum of their absolute values.

    Tensor cores drop bits below the last place of the largest term.

    Args:
        columns: number of products.
        fp8_on: the device, if the products are of e4m3: a product with scales adds roundings, and GPUs add
            TENSOR_CORES.
    """
    if fp8_on is None:
        return 2 * columns * UNIT
    return 2 * (columns + 2) * UNIT + (TENSOR_CORES if fp8_on.type == "cuda" else 0.0)


def product(rows: torch.Tensor, off: torch.Tensor, w: torch.Tensor, lost: float) -> Value:
    """Multiply rows `[T, K]`, with errors `off`, by w `[N, K]`; `lost` is the result of lost_by_sums."""
    return rows @ w.T, (off + lost * (rows.abs() + off)) @ w.abs().T


def gated(both: torch.Tensor, off: torch.Tensor, activation: GatedActivation = SWIGLU) -> Value:
    """Return activation(gate, up); `both` holds gate and up side by side.

    The slope of silu is at most 1.1, that of GELU at most 1.13. __expf has a relative error of up to 2^-16. __fdividef
    returns 0 for a divisor beyond 2^126 = exp(87.3).  GELU adds 1 to a number near -1 where the gate is far below 0.
    """
    (gate, up), (gate_off, up_off) = both.chunk(2, -1), off.chunk(2, -1)
    if activation != SWIGLU:
        factor = up.abs().clamp(max=activation.limit) + FORMULAS[activation.name].offset
        value, (_, _, by_up) = activation.apply(gate, up), activation.derivatives(gate, torch.zeros_like(up))
        slope = 1.13 * gate_off * (factor + up_off) + by_up.abs() * up_off
        return value, slope + 2.0**-16 * value.abs() + 2.0**-21 * (gate.abs() + 1) * factor
    value = silu(gate) * up
    lost = 1.1 * gate_off * (up.abs() + up_off) + silu(gate).abs() * up_off
    return value, lost + torch.where(gate < -87, 1, 2.0**-16) * value.abs()


def biased(value: torch.Tensor, off: torch.Tensor, bias: torch.Tensor | None) -> Value:
    """Return value + bias, added in float32; None: the value as it is."""
    if bias is None:
        return value, off
    total = value + bias.double()
    return total, off + UNIT * (total.abs() + off)


def rounded(value: torch.Tensor, off: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error bound after rounding to nearest in `dtype`."""
    rounding = torch.finfo(dtype).eps / 2
    return off + rounding * (value.abs() + off) + torch.finfo(dtype).smallest_normal * rounding + 2.0**-126


def cast(value: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Return the error bound of rows after a cast to e4m3 with one scale for 128 columns.

    The cast adds half of the last of 4 significant bits, or half of the smallest step of e4m3 for values that are small
    against the largest.
    """
    rows, columns = value.shape
    largest = torch.zeros(rows, -(-columns // GROUP) * GROUP, dtype=value.dtype, device=value.device)
    largest[:, :columns] = value.abs() + off
    scale = largest.view(rows, -1, GROUP).amax(dim=2).clamp(min=1e-4) / 448
    least = scale.repeat_interleave(GROUP, dim=1)[:, :columns] * 2.0**-10
    return off + torch.maximum(2.0**-4 * (value.abs() + off), least) * (1 + 2.0**-20)


def in_float64(values: Fp8, rows: int) -> torch.Tensor:
    """Return the exact values; `rows` rows share a scale."""
    return widen(values.data.double(), values.scales.double(), rows)


def expected_gemm(
    x: Fp8 | torch.Tensor,
    w: Fp8 | torch.Tensor,
    counts: Sequence[int],
    *,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield for each expert the slice of its rows, the float64 result, and the error bound of a result on `device`."""
    rows = (in_float64(x, 1) if isinstance(x, Fp8) else x.double()).flatten(0, -2)
    on = device if isinstance(x, Fp8) else None
    for group, place in enumerate(groups_of(x.data, list(counts), alignment)):
        of_group = in_float64(Fp8(w.data[group], w.scales[group]), GROUP) if isinstance(w, Fp8) else w[group].double()
        matrix = deinterleave(of_group) if activation and interleaved else of_group
        exact = torch.zeros_like(rows[place])
        want, off = product(rows[place], exact, matrix, lost_by_sums(matrix.shape[1], on))
        if activation:
            want, off = gated(want, off)
        yield place, want, rounded(want, off, dtype)
