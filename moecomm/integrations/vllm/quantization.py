"""Rows in the formats of vLLM's FusedMoEQuantConfig: which of them are cast before they are sent, and their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from moecomm import formats
from moecomm.integrations.vllm.managers import OpenedBuffers

_BLOCK_SCALED = ("nvfp4", "mxfp8")  # their scales travel linear, and experts may want them in blocks
_WITH_ONE_SCALE = (torch.float8_e4m3fn, torch.int8)


class Cast(NamedTuple):
    """Rows as they are sent.

    Attributes:
        rows: `[T, n]`; FP8 without scales as bytes.
        scales: `[T, m]`, or None: none travel.
        dtype: of rows that have been cast.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    dtype: torch.dtype | None = None


def is_cast_first(rounds: OpenedBuffers, config: Any) -> bool:
    """Return whether rows are cast where their tokens are; else they are where they have arrived.

    They are, where a scale belongs to a row or a part of it.  One scale for all rows, and the global scale of NVFP4,
    are those of the experts: rows are cast with them first if all ranks have the same.
    """
    if config.is_block_quantized or config.quant_dtype == "mxfp8":
        return True
    if config.quant_dtype not in (*_WITH_ONE_SCALE, "nvfp4"):
        return False
    scale = _given_scale(config)
    if scale is None:
        return bool(config.per_act_token_quant)
    return scale.numel() == 1 and rounds.is_alike(scale)


def cast(rows: torch.Tensor, config: Any) -> Cast:
    """Cast rows by vLLM's quantizer.  A rank without tokens gets as many columns as the others."""
    tokens, given = len(rows), _given_scale(config)
    alignment = getattr(config, "mx_alignment", 0)
    values, scales = moe_kernel_quantize_input(
        rows if tokens else rows.new_zeros((1, rows.shape[1])),
        given,
        quant_dtype=config.quant_dtype,
        per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape,
        **({"is_scale_swizzled": False} if config.quant_dtype in _BLOCK_SCALED else {}),
        **({"mx_alignment": alignment} if alignment else {}),
    )
    dtype = values.dtype
    if scales is None or (given is not None and config.quant_dtype in _WITH_ONE_SCALE):
        return Cast((values.view(torch.uint8) if dtype.itemsize == 1 else values)[:tokens], None, dtype)
    if dtype.itemsize == 1 and values.shape[1] == rows.shape[1]:
        values = values.view(torch.float8_e4m3fn)  # bytes are bytes, and rounds know these
    return Cast(values[:tokens], scales.reshape(len(values), -1)[:tokens], dtype)


def for_experts(
    x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, config: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows `[..., rows, n]` that have arrived, and scales as vLLM's quantizer lays them out.

    In blocks (`is_scale_swizzled`), scales of NVFP4 are `[..., rows, m]` rounded up to blocks, and those of MXFP8
    `[..., elements]`.
    """
    x = x.view(dtype)
    if scales is None:
        return x, config.a1_scale
    if config.quant_dtype == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    if config.quant_dtype in _BLOCK_SCALED and config.is_scale_swizzled:
        *experts, rows, columns = scales.shape
        scales = formats.swizzle(scales)
        if config.quant_dtype == "nvfp4":
            scales = scales.view(*experts, -(-rows // 128) * 128, -(-columns // 4) * 4)
    return x, scales


def _given_scale(config: Any) -> torch.Tensor | None:
    scale: torch.Tensor | None = config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
    return scale
