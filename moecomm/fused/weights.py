"""Weights of experts: drawn ones, and the interleaved order of w13, which lets the GEMM compute SwiGLU in registers."""

from __future__ import annotations

import torch

from moecomm.base.validation import check_dense
from moecomm.errors import BadInput
from moecomm.router import drawn

GRANULARITY = 8  # rows: columns of the product that are 8 apart are in registers of the same lane (csrc/gemm/wgmma.cuh)


def interleave(w13: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of w13 by 8: 8 gate rows, their 8 up rows, and so on.  Do it once, when weights are loaded.

    Args:
        w13: `[..., 2 I, H]`, any dtype: I gate rows, then I up rows; I a multiple of 8.

    Returns:
        The same shape, contiguous: row 16 b + i is gate row 8 b + i, row 16 b + 8 + i is up row 8 b + i, i < 8.

    Raises:
        BadInput: I is not a multiple of 8.
    """
    return _swapped(w13, (2, _blocks(w13)))


def deinterleave(w13: torch.Tensor) -> torch.Tensor:
    """Invert `interleave`: return `[..., 2 I, H]` with all gate rows, then all up rows.

    Raises:
        BadInput: I is not a multiple of 8.
    """
    return _swapped(w13, (_blocks(w13), 2))


def _swapped(w13: torch.Tensor, parts: tuple[int, int]) -> torch.Tensor:
    cut = w13.reshape(*w13.shape[:-2], *parts, GRANULARITY, w13.shape[-1])
    return cut.transpose(-4, -3).reshape(w13.shape).contiguous()


def _blocks(w13: torch.Tensor) -> int:
    check_dense("w13", w13)
    if w13.dim() < 2 or w13.shape[-2] % (2 * GRANULARITY):
        raise BadInput("w13", tuple(w13.shape), "[..., 2 I, H] with I a multiple of 8")
    return w13.shape[-2] // (2 * GRANULARITY)


def expert_weights(
    expert: int,
    hidden: int,
    intermediate: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (w13 [2 I, H], w2 [H, I]) of one expert, drawn from `seed`; the values are equal on all ranks."""
    generator = _generator(seed, expert)
    w13 = drawn(generator, 2 * intermediate, hidden) / hidden**0.5
    w2 = drawn(generator, hidden, intermediate) / intermediate**0.5
    return w13.to(device=device, dtype=dtype), w2.to(device=device, dtype=dtype)


def first_weights(expert: int, hidden: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first 8 values of an expert's w13, without drawing the others."""
    first: torch.Tensor = drawn(_generator(seed, expert), 16)[:8] / hidden**0.5  # torch draws normal values by 16
    return first.to(dtype)


def _generator(seed: int, expert: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed) * 1_000_003 + expert)
