"""Grouped GEMMs of FP8 of another library, where it can be imported.

Written to its interface as published (deep_gemm 2.x); where it raises, it has no figure, and a warning says why.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("moecomm")

Call = Callable[[int], Any]
ALIGNMENT = 128  # rows that deep_gemm's groups begin at multiples of


def fp8(x: Any, weights: list[Any], counts: torch.Tensor) -> dict[str, Call]:
    """By name: calls that multiply x, a pair of rows and scales, with one of the weights; x is laid out before."""
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
    """With groups that begin at multiples of ALIGNMENT: int64 [rows], the place of each; int32, a place's group."""
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
