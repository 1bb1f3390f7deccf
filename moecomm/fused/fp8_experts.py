"""Gated experts with FP8 weights: the compute step of the unfused Buffer.moe, after a dispatch that casts."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.base.arrays import check_tensor
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels, reference
from moecomm.fused.activations import SWIGLU, GatedActivation
from moecomm.fused.biases import Biases
from moecomm.fused.fp8 import Fp8
from moecomm.fused.gemm import multiply
from moecomm.fused.operands import Operands, unfit
from moecomm.rounds.rounds import Rounds


def check_fp8(rounds: Rounds, w13: torch.Tensor | Fp8, w2: torch.Tensor | Fp8, interleaved: bool) -> tuple[Fp8, Fp8]:
    """Check FP8 weights before any rank sends a row.  Raises BadInput or Unsupported, the same on all ranks."""
    if not isinstance(w13, Fp8) or not isinstance(w2, Fp8):
        argument = "w13" if isinstance(w2, Fp8) else "w2"
        raise BadInput(argument, "no pair of e4m3 weights and scales", "one, as the other weights are")
    local, hidden = len(rounds.local_experts), rounds.hidden
    about: dict[str, Any] = {"device": rounds.device, "dtypes": (kernels.FP8,)}
    check_tensor("w2", w2.data, **about, shape=(local, hidden, None))
    intermediate = w2.data.shape[2]
    check_tensor("w13", w13.data, **about, shape=(local, 2 * intermediate, hidden))
    for argument, w in (("w13", w13), ("w2", w2)):
        wanted = (local, -(-w.data.shape[1] // GROUP), -(-w.data.shape[2] // GROUP))
        check_tensor(argument, w.scales, device=rounds.device, dtypes=(torch.float32,), shape=wanted)
        if not w.data.is_contiguous() or w.data.data_ptr() % 16 or not w.scales.is_contiguous():
            raise BadInput(argument, f"strides {w.data.stride()}", "contiguous weights that begin at multiples of 16")
    if why := _lacks(rounds, rounds.settings.local_experts(), hidden, intermediate, interleaved):
        raise Unsupported(f"experts with weights in FP8: {why}")
    return w13, w2


def apply_fp8_experts(
    rows: Fp8,
    w13: Fp8,
    w2: Fp8,
    tokens_per_expert: torch.Tensor,
    dtype: torch.dtype,
    *,
    interleaved: bool = False,
    expected_rows: int | None = None,
    activation: GatedActivation = SWIGLU,
    biases: Biases = (None, None),
) -> torch.Tensor:
    """Apply gated experts to dispatched e4m3 rows `[rows, H]`; return `[rows, H]` of `dtype`.

    Rows, counts, activation and biases are as in moecomm.fused.layer.apply_experts.
    """
    x, counts, intermediate = rows.data, tokens_per_expert, w2.data.shape[2]
    if not x.is_cuda:
        how: dict[str, Any] = {"alignment": 1, "interleaved": interleaved}
        inner = Fp8(x.new_empty(len(x), intermediate), rows.scales.new_empty(len(x), -(-intermediate // GROUP)))
        reference.grouped_gemm(rows, w13, counts, **how, activation=activation, out=inner, bias=biases[0])
        y = torch.empty_like(x, dtype=dtype)
        reference.grouped_gemm(inner, w2, counts, **how, activation=None, out=y, bias=biases[1])
        return y
    expected = len(x) // len(w2.data) if expected_rows is None else expected_rows
    inner = Fp8(x.new_empty(len(x), intermediate), rows.scales.new_empty(len(x), -(-intermediate // GROUP)))
    y = torch.empty_like(x, dtype=dtype)
    first = Operands(x, w13.data, counts, rows.scales, w13.scales, biases[0])
    multiply(first, activation, interleaved, *inner, expected)
    second = Operands(inner.data, w2.data, counts, inner.scales, w2.scales, biases[1])
    multiply(second, None, False, y, None, expected)
    return y


def _lacks(rounds: Rounds, local: int, hidden: int, intermediate: int, interleaved: bool) -> str:
    """Return why grouped_gemm cannot compute such experts on this device; empty if it can."""
    if rounds.dtype not in kernels.TYPES:
        return f"the Buffer's {rounds.dtype} is neither bfloat16 nor float16"
    if hidden % 16:
        return f"H = {hidden} is no multiple of 16"
    if intermediate == 0 or unfit(2 * intermediate, hidden, True, True, interleaved) or intermediate % 16:
        return f"I = {intermediate} is no multiple of {16 if interleaved else 32}"
    if local > kernels.MOST_GROUPS:
        return f"a rank has {local} experts, more than {kernels.MOST_GROUPS}"
    if rounds.device.type == "cuda" and torch.cuda.get_device_capability(rounds.device.index) != (9, 0):
        name = torch.cuda.get_device_name(rounds.device.index)
        return f"{name} is no GPU of compute capability 9.0 (Hopper)"
    return ""
