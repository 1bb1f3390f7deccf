"""The publish step: copies a layer's rows to where peers read them; with FP8 weights it casts them and adds scales."""

from __future__ import annotations

from functools import lru_cache

import torch

from moecomm.dispatch.reference import GROUP
from moecomm.fused.kernels import FP8, LEAST_COUNTED, NAMES, PUBLISH_THREADS
from moecomm.gpu.plain_kernel import PlainKernel


def row_pitch(dtype: torch.dtype, hidden: int) -> int:
    """Return RowConfig::pitch: the stride in bytes of published rows; with FP8 a row includes its scales."""
    if dtype != FP8:
        return dtype.itemsize * hidden
    return -(-(hidden + 4 * -(-hidden // GROUP)) // 128) * 128


def row_config(dtype: torch.dtype, hidden: int, counted: int = LEAST_COUNTED) -> str:
    """Return a RowConfig (csrc/fused/layer.cuh) as C++ source."""
    return f"RowConfig{{.type = Type::{NAMES[dtype]}, .hidden = {hidden}, .counted = {counted}}}"


@lru_cache(maxsize=64)
def publish_kernel(given: torch.dtype, dtype: torch.dtype, hidden: int) -> PlainKernel:
    """Return the kernel that publishes rows of dtype `given` as `dtype`."""
    entry = f"publish_rows<{row_config(dtype, hidden)}, Type::{NAMES[given]}>"
    return PlainKernel("fused/publish", entry, "LayerArgs", PUBLISH_THREADS)
