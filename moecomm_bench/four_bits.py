"""Weights in MXFP4."""

from __future__ import annotations

import torch

from moecomm.fused import Mxfp4
from moecomm.gpu.quantize_rows import cast


def in_mxfp4(w: torch.Tensor) -> Mxfp4:
    """Return weights `[experts, N, K]` in MXFP4."""
    experts, rows, columns = w.shape
    data, scales = cast(w.flatten(0, 1), "mxfp4")
    assert scales is not None
    return Mxfp4(data.view(experts, rows, columns // 2), scales.view(torch.uint8).view(experts, rows, columns // 32))
