"""Grouped FP8 GEMMs of another library, where it can be imported.

Written for its published interface (deep_gemm 2.x). If it raises, it has no figure, and a warning gives the reason.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("moecomm")

Call = Callable[[int], Any]
ALIGNMENT = 128  # deep_gemm's groups begin at multiples of this many rows


def fp8(x: Any, weights: list[Any], counts: torch.Tensor) -> dict[str, Call]:
    """Return calls by library that multiply x, a pair of rows and scales, with one of the weights.

    The layout of x is converted in advance. Empty where no library can be imported.
    """
    try:
        library = importlib.import_module("deep_gemm")
    except (ImportError, OSError):
        return {}
    try:
        call = _deep_gemm(library, x, weights, counts)
        call(0)
    except (AssertionError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        log.warning("deep_gemm: %s", error)
        return {}
    return {"deep_gemm": call}


def padded_rows(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad groups to multiples of ALIGNMENT: int64 [rows], the new place of each row; int32, the group of each place."""
    counts = counts.long()
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    group = torch.arange(len(counts), device=counts.device)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    row = torch.arange(int(counts.sum()), device=counts.device)
    return row + shift.repeat_interleave(counts), group.repeat_interleave(padded).int()


def _deep_gemm(library: Any, x: Any, weights: list[Any], counts: torch.Tensor) -> Call:
    place, group = padded_rows(counts)
    data = torch.zeros(len(group), x[0].shape[1], dtype=torch.uint8, device=counts.device)
    data[place] = x[0].view(torch.uint8)
    scales = x[1].new_ones(len(group), x[1].shape[1])
    scales[place] = x[1]
    if (turn := getattr(library, "get_mn_major_tma_aligned_tensor", None)) is not None:
        scales = turn(scales)
    rows = data.view(torch.float8_e4m3fn), scales
    out = torch.empty(len(group), weights[0][0].shape[1], dtype=torch.bfloat16, device=counts.device)
    multiply = library.m_grouped_fp8_gemm_nt_contiguous
    return lambda i: multiply(rows, tuple(weights[i % len(weights)]), out, group)
