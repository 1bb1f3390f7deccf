"""Weights and rows in formats other than FP8 with scales for 128 columns: scales of rows and channels, INT8, MXFP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moecomm.base import formats
from moecomm.base.arrays import check_tensor
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import check_dense, check_dtype
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.fp8 import Fp8, as_operand
from moecomm.gpu.quantize_rows import cast
from moecomm.rounds.rounds import Rounds

FP8 = torch.float8_e4m3fn
MX_GROUP = 32  # values that share an exponent
ROW_FORMATS = {FP8: "fp8_token", torch.int8: "int8_token"}  # of rows with one scale each, by dtype


class Int8(NamedTuple):
    """int8 values with scales; a pair stands for the values data * scale.

    Attributes:
        data: int8, of rows `[rows, K]` or `[experts, rows, K]`; of weights `[experts, N, K]`.
        scales: float32.  Of rows `[..., 1]`; of weights one for a channel, `[experts, N]`, or one for a matrix,
            `[experts]`.
    """

    data: torch.Tensor
    scales: torch.Tensor


class Mxfp4(NamedTuple):
    """MXFP4 weights (OCP Microscaling): e2m1 values with an exponent for 32 columns.

    Attributes:
        data: uint8 `[experts, N, K / 2]`: two values a byte, the even column in the low four bits.
        scales: uint8 `[experts, N, K / 32]` (UE8M0): the values of a group are e2m1 * 2^(scale - 127); 255 is NaN.
    """

    data: torch.Tensor
    scales: torch.Tensor


Weights = torch.Tensor | Fp8 | Int8 | Mxfp4
ByChannel = Fp8 | Int8  # pairs with scales of rows or of channels


def as_weights(argument: str, given: Any) -> Weights:
    """Convert an array to a torch tensor, or a pair of arrays to the format that its dtype says.  Raises BadInput."""
    operand = as_operand(argument, given)
    if isinstance(operand, Fp8) and operand.data.dtype is torch.int8:
        return Int8(*operand)
    if isinstance(operand, Fp8) and operand.data.dtype is torch.uint8:
        return Mxfp4(*operand)
    return operand


def is_by_channel(w: Weights) -> bool:
    """Return whether the weights have scales of channels or matrices, not of blocks."""
    return isinstance(w, Int8) or (isinstance(w, Fp8) and w.scales.dim() < 3)


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
    data, scales = cast(x.detach().flatten(0, -2) if x.dim() > 1 else x.detach()[None], ROW_FORMATS[dtype])
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


def check_mxfp4_values(argument: str, w: Mxfp4) -> None:
    """Raise BadInput unless values and exponents fit together."""
    for tensor in w:
        check_dense(argument, tensor)
        if tensor.dtype is not torch.uint8 or tensor.dim() != 3 or tensor.device != w.data.device:
            raise BadInput(argument, f"{tuple(tensor.shape)} of {tensor.dtype}", "uint8 of three dimensions")
    experts, rows, half = w.data.shape
    if 2 * half % MX_GROUP or w.scales.shape != (experts, rows, 2 * half // MX_GROUP):
        got = f"values {tuple(w.data.shape)} and exponents {tuple(w.scales.shape)}"
        raise BadInput(argument, got, "[experts, N, K / 2] and [experts, N, K / 32]")


def check_mxfp4(rounds: Rounds, w13: Weights, w2: Weights) -> tuple[Mxfp4, Mxfp4]:
    """Check MXFP4 weights of Buffer.moe before any rank sends a row.  Raises BadInput or Unsupported."""
    for argument, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, Mxfp4):
            raise BadInput(argument, "another format", "MXFP4, as the other weights are")
    assert isinstance(w13, Mxfp4) and isinstance(w2, Mxfp4)
    if rounds.dtype is not torch.bfloat16:
        raise Unsupported(f"experts in MXFP4: the Buffer's {rounds.dtype} is not bfloat16, which has its exponents")
    local, hidden = len(rounds.local_experts), rounds.hidden
    about: dict[str, Any] = {"device": rounds.device, "dtypes": (torch.uint8,)}
    check_tensor("w2", w2.data, **about, shape=(local, hidden, None))
    intermediate = 2 * w2.data.shape[2]
    if hidden % MX_GROUP or intermediate == 0 or intermediate % MX_GROUP:
        raise Unsupported(f"experts in MXFP4: H = {hidden} or I = {intermediate} is no multiple of {MX_GROUP}")
    check_tensor("w13", w13.data, **about, shape=(local, 2 * intermediate, hidden // 2))
    check_tensor("w13", w13.scales, **about, shape=(local, 2 * intermediate, hidden // MX_GROUP))
    check_tensor("w2", w2.scales, **about, shape=(local, hidden, intermediate // MX_GROUP))
    for argument, w in (("w13", w13), ("w2", w2)):
        if not w.data.is_contiguous() or not w.scales.is_contiguous() or w.data.data_ptr() % 16:
            raise BadInput(argument, f"strides {w.data.stride()}", "contiguous weights that begin at multiples of 16")
    return w13, w2


def dequantize(w: Mxfp4) -> torch.Tensor:
    """Return MXFP4 weights in bfloat16, `[experts, N, K]`.

    Exact, also where the result is subnormal: values have two significant bits, and bfloat16 has the exponents of
    UE8M0.  Values of 2^128 and more become infinite, and those of a group whose scale is 255 are NaN.
    """
    experts, rows, half = w.data.shape
    out = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=w.data.device)
    for data, scales, to in zip(w.data, w.scales, out, strict=True):  # one matrix at a time, for the float32 values
        to.copy_(formats.dequantize(data, scales.view(torch.float8_e8m0fnu), "mxfp4"))
    return out
