"""FP8 and INT8 weights with a scale for each channel or matrix, and rows with one scale each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import check_dense, check_dtype
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels
from moecomm.fused.fp8 import Fp8
from moecomm.fused.weight_format import WeightFormat, check_begin, check_shapes, described, not_hopper
from moecomm.gpu.quantize_rows import cast
from moecomm.rounds.rounds import Rounds

FP8 = torch.float8_e4m3fn
_ROW_FORMATS = {FP8: "fp8_token", torch.int8: "int8_token"}  # of rows with one scale each, by dtype
_UNIT = 16  # bytes of a row are a multiple of it, as TMA and the rows of a dispatch need them


class Int8(NamedTuple):
    """int8 values with scales; a pair stands for the values data * scale.

    Attributes:
        data: int8, of rows `[rows, K]` or `[experts, rows, K]`; of weights `[experts, N, K]`.
        scales: float32.  Of rows `[..., 1]`; of weights one for a channel, `[experts, N]`, or one for a matrix,
            `[experts]`.
    """

    data: torch.Tensor
    scales: torch.Tensor


ByChannel = Fp8 | Int8


class _Channels(WeightFormat):
    """Weights are an Fp8 or an Int8.  First products are rounded to the dtype of the Buffer, and cast as rows are."""

    kind, values = Int8, torch.int8
    casts = True
    tuned_as = FP8
    travels: Mapping[torch.dtype, str] = _ROW_FORMATS
    slow = "torch computes experts with scales of channels: %s"

    def check(self, rounds: Rounds, w13: Any, w2: Any, interleaved: bool) -> tuple[Any, Any]:
        kind = Int8 if isinstance(w2, Int8) else Fp8
        for argument, w in (("w13", w13), ("w2", w2)):
            if not isinstance(w, kind) or not (kind is Int8 or w.scales.dim() < 3):
                raise BadInput(argument, "another format", "that of the other weights: both have scales of channels")
        local, hidden = len(rounds.local_experts), rounds.hidden
        intermediate = check_shapes(rounds, w13, w2, (torch.int8 if kind is Int8 else FP8,))
        checked = []
        for argument, w in (("w13", w13), ("w2", w2)):
            check_begin(argument, w.data)
            channels = tuple(w.data.shape[:2])
            shape = channels if w.scales.dim() == 2 and w.scales.shape[1] != 1 else (local, 1)[: w.scales.dim()]
            check_tensor(argument, w.scales, device=rounds.device, dtypes=(torch.float32,), shape=shape)
            scales = w.scales if shape == channels else w.scales.reshape(-1, 1).expand(channels)
            checked.append(kind(w.data, scales.contiguous()))
        if rounds.dtype not in kernels.TYPES:
            raise Unsupported(f"experts in FP8 or INT8: the Buffer's {rounds.dtype} is neither bfloat16 nor float16")
        if hidden % _UNIT or intermediate == 0 or intermediate % _UNIT:
            raise Unsupported(f"experts in FP8 or INT8: H = {hidden} or I = {intermediate} is no multiple of {_UNIT}")
        if rounds.settings.local_experts() > kernels.MOST_GROUPS:
            raise Unsupported(f"experts in FP8 or INT8: a rank has more than {kernels.MOST_GROUPS}")
        return checked[0], checked[1]

    def lacks_kernel(self, x: torch.Tensor, w2: Any) -> str:
        return not_hopper(x.device.index) if x.is_cuda else ""

    def cast(self, x: torch.Tensor, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(x, values)

    def check_scales(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, w: torch.Tensor, w_scales: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Check scales of rows and channels, or of tensors; return them as `[..., 1]` and contiguous `[E, N]`."""
        if x_scales is None or w_scales is None or w_scales.dim() > 2:
            return super().check_scales(x, x_scales, w, w_scales)
        if x.dtype not in (kernels.FP8, torch.int8):
            raise BadInput("x", str(x.dtype), "float8_e4m3fn or int8, beside scales of rows and channels")
        of_rows, of_w = (*x.shape[:-1], 1), tuple(w.shape[:2])
        for argument, scales in (("x", x_scales), ("w", w_scales)):
            if scales.dtype != torch.float32 or scales.device != x.device:
                raise BadInput(argument, f"scales {described(scales)}", f"float32 on {x.device}")
        if x_scales.shape != of_rows and x_scales.shape not in ((), (1,)):
            raise BadInput("x", f"scales {described(x_scales)}", f"{of_rows} beside scales of channels, or [1]")
        if x_scales.dim() == 3 and not x_scales.is_contiguous():
            raise BadInput("x", "scales with gaps", "contiguous ones")
        if w_scales.shape not in (of_w, (of_w[0], 1), of_w[:1]):
            raise BadInput("w", f"scales {described(w_scales)}", f"{of_w}, or {of_w[:1]}, or those of blocks")
        if w_scales.shape != of_w:
            w_scales = w_scales.reshape(-1, 1).expand(of_w)
        return x_scales.expand(of_rows) if x_scales.shape != of_rows else x_scales, w_scales.contiguous()


CHANNELS = _Channels()


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8) -> ByChannel:
    """Cast each row with a scale of its own, as vLLM's dynamic per-token casts do.  No gradients.

    The formats "fp8_token" and "int8_token" of moecomm.formats.

    Args:
        x: `[..., K]`, bfloat16, float16 or float32, K at least 1.
        dtype: float8_e4m3fn or int8.

    Returns:
        An Fp8 or Int8: data `[..., K]`, scales `[..., 1]`.

    Raises:
        BadInput: x of another dtype, or without columns; another `dtype`.
    """
    check_dense("x", x)
    check_dtype("dtype", dtype, (FP8, torch.int8))
    if x.dim() < 1 or x.shape[-1] == 0 or x.dtype not in DTYPES:
        raise BadInput("x", f"{tuple(x.shape)} of {x.dtype}", f"[..., K] of {' or '.join(map(str, DTYPES))}")
    data, scales = cast(x.detach().flatten(0, -2) if x.dim() > 1 else x.detach()[None], _ROW_FORMATS[dtype])
    assert scales is not None
    data, scales = data.view(x.shape), scales.view(*x.shape[:-1], 1)
    return Fp8(data, scales) if dtype is FP8 else Int8(data, scales)


def quantize_channels(w: torch.Tensor, dtype: torch.dtype = FP8) -> ByChannel:
    """Cast weights with a scale for each output channel, by the arithmetic of quantize_rows.  No gradients.

    Args:
        w: `[..., N, K]`, bfloat16, float16 or float32.
        dtype: float8_e4m3fn or int8.

    Returns:
        An Fp8 or Int8: data `[..., N, K]`, scales `[..., N]`.

    Raises:
        BadInput: as quantize_rows.
    """
    check_dense("w", w)
    if w.dim() < 2:
        raise BadInput("w", tuple(w.shape), "[..., N, K]")
    data, scales = quantize_rows(w, dtype)
    return Fp8(data, scales.squeeze(-1)) if dtype is FP8 else Int8(data, scales.squeeze(-1))
