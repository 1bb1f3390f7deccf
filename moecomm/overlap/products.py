"""Products of the operators without fusion: float32 accumulation, and one rounding to the dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute `x @ w.mT` in the dtype of x, which is that of w (CPUs: or float32); both may be batched alike.

    Autocast is disabled, because it would choose another dtype.
    """
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type == "cpu":  # some of torch's 16-bit products on CPUs round between blocks of K
            return (x.float() @ w.float().mT).to(x.dtype)
        return x @ w.mT


def sum_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one dtype in float32, in their order, and round once."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(first.dtype)
