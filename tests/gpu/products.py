"""Checks of grouped GEMMs on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moecomm.base.choices import Activation
from moecomm.testing.bounds import expected_gemm


@dataclass(frozen=True)
class WidenedCase:
    """Sizes of a product whose kernel widens its weights."""

    counts: tuple[int, ...]
    depth: int
    columns: int
    activation: Activation | None = None
    interleaved: bool = True
    bias: bool = False
    limit: float | None = None

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.columns // (2 if self.activation else 1)

    def device_counts(self) -> torch.Tensor:
        return torch.tensor(self.counts, dtype=torch.int32, device="cuda")

    def how(self, g: torch.Generator) -> dict[str, Any]:
        """Arguments of grouped_gemm, with a bias that is drawn."""
        bias = torch.randn(len(self.counts), self.columns, generator=g, device="cuda") if self.bias else None
        about = {"activation": self.activation, "activation_limit": self.limit}
        return {**about, "interleaved": self.interleaved, "bias": bias}


WIDENED = {
    "gpt-oss w13": WidenedCase((0, 1, 7, 64, 300), 2880, 5760, "swigluoai", False, True),
    "gpt-oss w2": WidenedCase((0, 1, 7, 64, 300), 2880, 2880, bias=True),
    "DeepSeek-V4 w13": WidenedCase((0, 1, 7, 64, 300), 1024, 1024, "swiglu", False, limit=0.5),
    "Step-3.7 w13": WidenedCase((0, 1, 7, 64, 300), 1024, 1024, "swiglustep", False, limit=0.5),
    "one scale a row": WidenedCase((3, 90, 0, 31), 32, 8),
    "three scales a row": WidenedCase((3, 300, 0, 31), 96, 392),
}


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
