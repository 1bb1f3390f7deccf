"""Weights and rows in formats other than FP8 with scales for 128 columns: scales of rows and channels, INT8, FP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moecomm.base import formats
from moecomm.base.arrays import as_tensor, check_tensor
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import check_dense, check_dtype
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.fp8 import Fp8, as_operand
from moecomm.gpu.quantize_rows import cast
from moecomm.rounds.rounds import Rounds

FP8 = torch.float8_e4m3fn
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
        scales: `[experts, N, K / 32]`, float8_e8m0fnu or its bytes in uint8: the values of a group are
            e2m1 * 2^(byte - 127); 255 is NaN.
    """

    data: torch.Tensor
    scales: torch.Tensor


class Nvfp4(NamedTuple):
    """NVFP4 weights: e2m1 values with an e4m3 scale for 16 columns, and float32 factors.

    They stand for the bfloat16 values e2m1 * (scale * factor), computed in float32 and rounded once more.

    Attributes:
        data: uint8 `[experts, N, K / 2]`: two values a byte, the even column in the low four bits.
        scales: float8_e4m3fn `[experts, N, K / 16]`.
        factors: float32 `[experts]` or `[experts, 1]`, one for a matrix; or `[experts, N]`, one for a row.
    """

    data: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor


Fp4 = Mxfp4 | Nvfp4  # weights of four bits
Weights = torch.Tensor | Fp8 | Int8 | Fp4
ByChannel = Fp8 | Int8  # pairs with scales of rows or of channels


class _Packing(NamedTuple):
    name: str
    group: int  # columns that share a scale
    scales: tuple[torch.dtype, ...]


_PACKINGS: dict[type, _Packing] = {
    Mxfp4: _Packing("MXFP4", 32, (torch.uint8, torch.float8_e8m0fnu)),
    Nvfp4: _Packing("NVFP4", 16, (FP8,)),
}


def as_weights(argument: str, given: Any) -> Weights:
    """Convert an array to a torch tensor, or a tuple of arrays to the format that its length and dtype say.

    Raises BadInput.
    """
    if isinstance(given, tuple) and len(given) == len(Nvfp4._fields):
        packed = Nvfp4(*(as_tensor(argument, tensor)[0] for tensor in given))
        if packed.data.dtype is torch.uint8:
            return packed
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


def name_of(w: Fp4) -> str:
    """Return the name of the format."""
    return _PACKINGS[type(w)].name


def check_fp4_values(argument: str, w: Fp4) -> None:
    """Raise BadInput unless values, scales and factors fit together."""
    _, group, dtypes = _PACKINGS[type(w)]
    for tensor, wanted in ((w.data, (torch.uint8,)), (w.scales, dtypes)):
        check_dense(argument, tensor)
        if tensor.dtype not in wanted or tensor.dim() != 3 or tensor.device != w.data.device:
            want = f"{' or '.join(map(str, wanted))} of three dimensions"
            raise BadInput(argument, f"{tuple(tensor.shape)} of {tensor.dtype}", want)
    experts, rows, half = w.data.shape
    if 2 * half % group or w.scales.shape != (experts, rows, 2 * half // group):
        got = f"values {tuple(w.data.shape)} and scales {tuple(w.scales.shape)}"
        raise BadInput(argument, got, f"[experts, N, K / 2] and [experts, N, K / {group}]")
    if isinstance(w, Nvfp4):
        check_dense(argument, w.factors)
        shapes = (experts,), (experts, 1), (experts, rows)
        if w.factors.dtype is not torch.float32 or w.factors.device != w.data.device or w.factors.shape not in shapes:
            got = f"factors {tuple(w.factors.shape)} of {w.factors.dtype} on {w.factors.device}"
            raise BadInput(argument, got, f"float32 [experts] or [experts, N] on {w.data.device}")


def check_fp4(rounds: Rounds, w13: Weights, w2: Weights) -> tuple[Fp4, Fp4]:
    """Check weights of four bits of Buffer.moe before any rank sends a row.  Raises BadInput or Unsupported."""
    kind = type(w2) if isinstance(w2, Fp4) else type(w13)
    name, group, dtypes = _PACKINGS[kind]
    for argument, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, kind):
            raise BadInput(argument, "another format", f"{name}, as the other weights are")
    assert isinstance(w13, Fp4) and isinstance(w2, Fp4)
    if rounds.dtype is not torch.bfloat16:
        raise Unsupported(f"experts in {name}: the Buffer's {rounds.dtype} is not bfloat16, which has its exponents")
    local, hidden = len(rounds.local_experts), rounds.hidden
    about: dict[str, Any] = {"device": rounds.device}
    check_tensor("w2", w2.data, **about, dtypes=(torch.uint8,), shape=(local, hidden, None))
    intermediate = 2 * w2.data.shape[2]
    if hidden % group or intermediate == 0 or intermediate % group:
        raise Unsupported(f"experts in {name}: H = {hidden} or I = {intermediate} is no multiple of {group}")
    check_tensor("w13", w13.data, **about, dtypes=(torch.uint8,), shape=(local, 2 * intermediate, hidden // 2))
    check_tensor("w13", w13.scales, **about, dtypes=dtypes, shape=(local, 2 * intermediate, hidden // group))
    check_tensor("w2", w2.scales, **about, dtypes=dtypes, shape=(local, hidden, intermediate // group))
    for argument, w in (("w13", w13), ("w2", w2)):
        check_fp4_values(argument, w)
        if not w.data.is_contiguous() or not w.scales.is_contiguous() or w.data.data_ptr() % 16:
            raise BadInput(argument, f"strides {w.data.stride()}", "contiguous weights that begin at multiples of 16")
    return w13, w2


def dequantize(w: Fp4) -> torch.Tensor:
    """Return weights of four bits in bfloat16, `[experts, N, K]`.

    Of MXFP4 exact, also where the result is subnormal: values have two significant bits, and bfloat16 has the exponents
    of UE8M0.  Values of 2^128 and more become infinite, and those of a group whose scale is 255 are NaN.

    Of NVFP4 rounded: scale * factor and its product with the value in float32, then to bfloat16.  Where these are
    normal numbers, the error is at most 2^-8 of the value.
    """
    experts, rows, half = w.data.shape
    out = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=w.data.device)
    factors = w.factors.reshape(experts, -1, 1) if isinstance(w, Nvfp4) else None
    for expert in range(experts):  # one matrix at a time, for the float32 values
        data, scales = w.data[expert], w.scales[expert]
        if factors is None:
            wide = formats.dequantize(data, scales.view(torch.float8_e8m0fnu), "mxfp4")
        else:
            wide = formats.dequantize(data, scales.float() * factors[expert], "nvfp4")
        out[expert].copy_(wide)
    return out
