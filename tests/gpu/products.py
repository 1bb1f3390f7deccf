"""Checks of grouped GEMMs on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.testing.bounds import expected_gemm


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(case: Any, x: Any, w: Any, counts: tuple[int, ...], out: torch.Tensor) -> None:
    """Rows of experts have the right values; others are as they were: NaN."""
    rows = out.flatten(0, -2)
    untouched = torch.ones(len(rows), dtype=torch.bool, device=out.device)
    for group, want, off in expected_gemm(x, w, counts, **case.how, dtype=case.dtype, device=out.device):
        wrong = ~((rows[group].double() - want).abs() <= off)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()}, first (row, column): {wrong.nonzero()[:4].tolist()}"
        )
        if case.whole and case.activation is None:
            assert torch.equal(rows[group], want.to(case.dtype))
        untouched[group] = False
    assert bool(rows[untouched].isnan().all())
