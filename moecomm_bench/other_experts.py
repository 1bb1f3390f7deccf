"""Experts of other libraries, where they can be imported, on the rows of one rank; no rows move between ranks.

Written for their published interfaces (deep_gemm 2.x, flashinfer 0.7). An exception becomes a row with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

Call = Callable[[], Any]
_ALIGNMENT = 128  # deep_gemm's groups begin at multiples of this many rows


def ways() -> dict[str, Callable[..., Call]]:
    """Return for each library that can be imported a function that makes a call from (rows, counts, w13, w2)."""
    found: dict[str, Callable[..., Call]] = {}
    for name, make in (("deep_gemm", _deep_gemm), ("flashinfer", _flashinfer)):
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            continue
        found[name] = make
    return found


def _deep_gemm(rows: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> Call:
    """Return deep_gemm's two contiguous grouped GEMMs with torch's SwiGLU between; padding groups is not timed."""
    gemm = importlib.import_module("deep_gemm").m_grouped_bf16_gemm_nt_contiguous
    padded = (counts.long() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    total = int(padded.sum())
    experts = torch.arange(len(counts), device=rows.device)
    group = experts.repeat_interleave(padded).int()
    x = rows.new_zeros(total, rows.shape[1])
    row = torch.arange(len(rows), device=rows.device)
    shift = (padded.cumsum(0) - padded) - (counts.long().cumsum(0) - counts.long())
    x[row + shift.repeat_interleave(counts.long())] = rows
    both, y = x.new_empty(total, w13.shape[1]), torch.empty_like(x)

    def call() -> None:
        gemm(x, w13, both, group)
        gate, up = both.chunk(2, dim=-1)
        gemm(silu(gate) * up, w2, y, group)

    return call


def _flashinfer(rows: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> Call:
    """Return flashinfer's CUTLASS experts, with each row as a token of one expert, so the call also permutes.

    flashinfer stores up rows before gate rows.
    """
    fused = importlib.import_module("flashinfer.fused_moe").cutlass_fused_moe
    experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts.long()).int().unsqueeze(1)
    scales = torch.ones(experts.shape, device=rows.device)
    up_first = torch.cat(w13.chunk(2, dim=1)[::-1], dim=1).contiguous()
    return lambda: fused(rows, experts, scales, up_first, w2, rows.dtype, quant_scales=[])
