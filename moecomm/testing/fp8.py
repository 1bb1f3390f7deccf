"""FP8 for tests: what a grouped GEMM makes of e4m3 with scales, and how far off a right answer may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moecomm.fused import Fp8, deinterleave
from moecomm.fused.fp8 import widen
from moecomm.fused.reference import groups_of
from moecomm.testing.bounds import GROUP, gated, lost_by_sums, product, rounded


def in_float64(values: Fp8, rows: int) -> torch.Tensor:
    """What they count for, exactly; `rows` share a scale."""
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
    """Of each expert's rows: where they lie, what they become, and how far from it what `device` makes may be."""
    rows = in_float64(x, 1).flatten(0, -2)
    for group, place in enumerate(groups_of(x.data, list(counts), alignment)):
        matrix = in_float64(Fp8(w.data[group], w.scales[group]), GROUP)
        matrix = deinterleave(matrix) if activation and interleaved else matrix
        exact = torch.zeros_like(rows[place])
        want, off = product(rows[place], exact, matrix, lost_by_sums(matrix.shape[1], device))
        if activation:
            want, off = gated(want, off)
        yield place, want, rounded(want, off, dtype)
