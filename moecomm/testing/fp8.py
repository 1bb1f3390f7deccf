"""FP8 for tests: the float64 result of a grouped GEMM of e4m3 with scales, and its error bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moecomm.fused import Fp8, deinterleave
from moecomm.fused.fp8 import widen
from moecomm.fused.reference import groups_of
from moecomm.testing.bounds import GROUP, gated, lost_by_sums, product, rounded


def in_float64(values: Fp8, rows: int) -> torch.Tensor:
    """Return the exact values; `rows` rows share a scale."""
    return widen(values.data.double(), values.scales.double(), rows)


def expected_gemm(
    x: Fp8,
    w: Fp8,
    counts: Sequence[int],
    *,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield for each expert the slice of its rows, the float64 result, and the error bound of a result on `device`."""
    rows = in_float64(x, 1).flatten(0, -2)
    for group, place in enumerate(groups_of(x.data, list(counts), alignment)):
        matrix = in_float64(Fp8(w.data[group], w.scales[group]), GROUP)
        matrix = deinterleave(matrix) if activation and interleaved else matrix
        exact = torch.zeros_like(rows[place])
        want, off = product(rows[place], exact, matrix, lost_by_sums(matrix.shape[1], device))
        if activation:
            want, off = gated(want, off)
        yield place, want, rounded(want, off, dtype)
