"""Weights and rows in formats other than FP8 with scales for 128 columns: scales of rows and channels, INT8, MXFP4."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import check_dense, check_dtype
from moecomm.dispatch.reference import E4M3_MAX
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.fp8 import Fp8, as_operand
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.structs import fields_of
from moecomm.rounds.rounds import Rounds

FP8 = torch.float8_e4m3fn
_INT8_MAX, _LEAST_FP8_SCALE = 127.0, 1 / (E4M3_MAX * 512)
_CAST_COLUMNS = 8  # that a lane of the kernel casts at once
MX_GROUP = 32  # values that share an exponent
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Args(ctypes.Structure):
    """QuantizeRowsArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("QuantizeRowsArgs")


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

    In float32, with amax the largest magnitude of the row:

    - float8_e4m3fn: scale = max(amax / 448, 1 / (448 * 512)), data = e4m3(clamp(value / scale, -448, 448)).
    - int8: scale = amax / 127, data = round to even(value * (127 / amax)), 0 in a row of zeros.

    A row with an infinity or a NaN has that scale, and stands for no finite value.

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
    if x.is_cuda and x.is_contiguous() and x.shape[-1] % _CAST_COLUMNS == 0 and x.data_ptr() % 16 == 0:
        return by_kernel(x.detach(), dtype)
    wide = x.detach().float()
    amax = wide.abs().amax(dim=-1, keepdim=True)
    if dtype is FP8:  # divided by tensors: for a scalar, torch multiplies by its reciprocal on GPUs
        scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=_LEAST_FP8_SCALE)
        return Fp8((wide / scales).clamp(-E4M3_MAX, E4M3_MAX).to(FP8), scales)
    most = torch.full_like(amax, _INT8_MAX)
    scales, up = amax / most, (most / amax).masked_fill(amax == 0, 0.0)
    data = (wide * up).round().nan_to_num(0.0).clamp(-_INT8_MAX, _INT8_MAX)
    return Int8(data.to(torch.int8), scales)


def kernel(given: torch.dtype, dtype: torch.dtype) -> plain_kernel.PlainKernel:
    """Return the kernel that casts rows of `given` to `dtype`."""
    entry = f"quantize_rows<Type::{row_pass.TYPES[given]}, {str(dtype is torch.int8).lower()}>"
    return row_pass.kernel("elementwise/quantize_rows", entry, "QuantizeRowsArgs")


def by_kernel(x: torch.Tensor, dtype: torch.dtype) -> ByChannel:
    """Compute quantize_rows with the kernel, on a GPU: contiguous rows of a multiple of 8 columns."""
    data = torch.empty_like(x, dtype=dtype)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    count, columns = scales.numel(), x.shape[-1]
    if count > 0:
        args = _Args(*map(row_pass.address, (x, data, scales)), count, columns)
        row_pass.launch(kernel(x.dtype, dtype), x.device, count * row_pass.ROW, args)
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
    return w13, w2


def dequantize(w: Mxfp4) -> torch.Tensor:
    """Return MXFP4 weights in bfloat16, `[experts, N, K]`.

    Exact, also where the result is subnormal: values have two significant bits, and bfloat16 has the exponents of
    UE8M0.  Values of 2^128 and more become infinite, and those of a group whose scale is 255 are NaN.
    """
    values = torch.tensor([sign * value for sign in (1, -1) for value in _E2M1], dtype=torch.bfloat16)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).to(w.data.device)  # low, high
    exponents = torch.arange(256, dtype=torch.int32)
    bits = (exponents << 7).index_fill(0, exponents[255:].long(), 0x7FC0).index_fill(0, exponents[:1].long(), 0x0040)
    powers = bits.to(torch.int16).view(torch.bfloat16).to(w.data.device)
    experts, rows, half = w.data.shape
    out = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=w.data.device)
    for data, scales, to in zip(w.data, w.scales, out, strict=True):  # one matrix at a time, for the indices' memory
        groups = to.view(rows, -1, MX_GROUP)
        groups.copy_(pairs[data.int()].view_as(groups))
        groups.mul_(powers[scales.int()].unsqueeze(2))
    return out
