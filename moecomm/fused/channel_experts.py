"""Gated experts whose weights have scales of channels (FP8, INT8): checks, and experts of the unfused Buffer.moe."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from moecomm.base.arrays import check_tensor
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels, reference
from moecomm.fused.activations import GatedActivation
from moecomm.fused.biases import Biases, add_bias, group_of_rows
from moecomm.fused.fp8 import Fp8
from moecomm.fused.gemm import multiply
from moecomm.fused.operands import Operands
from moecomm.fused.quantized import ByChannel, Int8, Weights, is_by_channel, quantize_rows
from moecomm.fused.weights import deinterleave
from moecomm.rounds.rounds import Rounds

_UNIT = 16  # bytes of a row are a multiple of it, as TMA and the rows of a dispatch need them


def check_channels(rounds: Rounds, w13: Weights, w2: Weights, interleaved: bool) -> tuple[ByChannel, ByChannel]:
    """Check weights with scales of channels or matrices, before any rank sends a row.

    Returns:
        The weights, with contiguous scales `[E/R, N]`.

    Raises:
        BadInput or Unsupported, the same on all ranks.
    """
    kind = Int8 if isinstance(w2, Int8) else Fp8
    for argument, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, kind) or not is_by_channel(w):
            raise BadInput(argument, "another format", "that of the other weights: both have scales of channels")
    assert isinstance(w13, (Fp8, Int8)) and isinstance(w2, (Fp8, Int8))
    local, hidden = len(rounds.local_experts), rounds.hidden
    about: dict[str, Any] = {"device": rounds.device, "dtypes": (torch.int8 if kind is Int8 else kernels.FP8,)}
    check_tensor("w2", w2.data, **about, shape=(local, hidden, None))
    intermediate = w2.data.shape[2]
    check_tensor("w13", w13.data, **about, shape=(local, 2 * intermediate, hidden))
    found: list[ByChannel] = []
    for argument, w in (("w13", w13), ("w2", w2)):
        if not w.data.is_contiguous() or w.data.data_ptr() % 16:
            raise BadInput(argument, f"strides {w.data.stride()}", "contiguous weights that begin at multiples of 16")
        channels = tuple(w.data.shape[:2])
        shape = channels if w.scales.dim() == 2 and w.scales.shape[1] != 1 else (local, 1)[: w.scales.dim()]
        check_tensor(argument, w.scales, device=rounds.device, dtypes=(torch.float32,), shape=shape)
        scales = w.scales if shape == channels else w.scales.reshape(-1, 1).expand(channels)
        found.append(kind(w.data, scales.contiguous()))
    if rounds.dtype not in kernels.TYPES:
        raise Unsupported(f"experts in FP8 or INT8: the Buffer's {rounds.dtype} is neither bfloat16 nor float16")
    if hidden % _UNIT or intermediate == 0 or intermediate % _UNIT:
        raise Unsupported(f"experts in FP8 or INT8: H = {hidden} or I = {intermediate} is no multiple of {_UNIT}")
    if rounds.settings.local_experts() > kernels.MOST_GROUPS:
        raise Unsupported(f"experts in FP8 or INT8: a rank has more than {kernels.MOST_GROUPS}")
    return found[0], found[1]


def lacks_kernel(device: torch.device) -> str:
    """Return why torch computes such experts on this device; empty if it does not, and on CPUs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device.index) != (9, 0):
        return f"{torch.cuda.get_device_name(device.index)} is no GPU of compute capability 9.0 (Hopper)"
    return ""


def apply_channel_experts(
    rows: ByChannel,
    w13: ByChannel,
    w2: ByChannel,
    tokens_per_expert: torch.Tensor,
    dtype: torch.dtype,
    *,
    interleaved: bool,
    expected_rows: int,
    activation: GatedActivation,
    biases: Biases,
) -> torch.Tensor:
    """Apply gated experts to dispatched rows `[rows, H]` with scales `[rows, 1]`; return `[rows, H]` of `dtype`.

    The activated values are rounded to `dtype`, and cast by quantize_rows for the second GEMM.  Rows and counts are as
    in moecomm.fused.layer.apply_experts, weights as from check_channels().
    """

    def product(
        rows: ByChannel, w: ByChannel, gated: GatedActivation | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x, woven = rows.data, interleaved and gated is not None
        out = torch.empty(len(x), w.data.shape[1] // (1 if gated is None else 2), dtype=dtype, device=x.device)
        if not x.is_cuda:
            how: dict[str, Any] = {"alignment": 1, "activation": gated, "interleaved": woven, "bias": bias}
            reference.grouped_gemm(rows, w, tokens_per_expert, **how, out=out)
        elif torch.cuda.get_device_capability(x.device.index) == (9, 0):
            given = Operands(x, w.data, tokens_per_expert, rows.scales, w.scales, bias)
            multiply(given, gated, woven, out, None, expected_rows)
        else:
            return _by_torch(rows, w, tokens_per_expert, dtype, woven, gated, bias)
        return out

    inner = product(rows, w13, activation, biases[0])
    return product(quantize_rows(inner, rows.data.dtype), w2, None, biases[1])


def _by_torch(
    rows: ByChannel,
    w: ByChannel,
    counts: torch.Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    activation: GatedActivation | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply by torch's grouped GEMM, which rounds sums to `dtype` before they are multiplied by their scales."""
    ends, matrices, channels = counts.cumsum(0, dtype=torch.int32), w.data.to(dtype), w.scales
    if interleaved:
        matrices, channels = deinterleave(matrices), deinterleave(channels.unsqueeze(2)).squeeze(2)
    sums = grouped_mm(rows.data.to(dtype), matrices.transpose(1, 2), offs=ends).float()
    groups = group_of_rows(ends, len(sums)).clamp(max=len(ends) - 1)
    total = add_bias(sums * (rows.scales * channels[groups]), bias, ends)
    return (total if activation is None else activation.apply(*total.chunk(2, dim=-1))).to(dtype)
