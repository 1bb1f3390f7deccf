"""Publishing: the rows of a layer to where peers read them, with weights in FP8 cast and with their scales."""

from __future__ import annotations

import torch

from moecomm.dispatch.reference import GROUP
from moecomm.fused.kernels import FP8, LEAST_COUNTED, NAMES, PUBLISH_THREADS
from moecomm.jit.plain_kernel import PlainKernel


def row_pitch(dtype: torch.dtype, hidden: int) -> int:
    """RowConfig::pitch: bytes from row to row, of what travels for a row of x: of FP8 the scales, too."""
    if dtype != FP8:
        return dtype.itemsize * hidden
    return -(-(hidden + 4 * -(-hidden // GROUP)) // 128) * 128


def row_config(dtype: torch.dtype, hidden: int, counted: int = LEAST_COUNTED) -> str:
    """RowConfig of csrc/fused/layer.cuh."""
    return f"RowConfig{{.type = Type::{NAMES[dtype]}, .hidden = {hidden}, .counted = {counted}}}"


def publish_kernel(given: torch.dtype, dtype: torch.dtype, hidden: int) -> PlainKernel:
    """Our rows of dtype `given` to where peers read them, as `dtype`."""
    entry = f"publish_rows<{row_config(dtype, hidden)}, Type::{NAMES[given]}>"
    return PlainKernel("fused/publish", entry, "LayerArgs", PUBLISH_THREADS)
