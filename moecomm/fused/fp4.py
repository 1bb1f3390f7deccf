"""Weights of four bits: MXFP4 and NVFP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moecomm.base import formats
from moecomm.base.arrays import check_tensor
from moecomm.base.validation import check_dense
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.weight_format import WeightFormat, check_begin
from moecomm.rounds.rounds import Rounds


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


Fp4 = Mxfp4 | Nvfp4


def dequantize(w: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return weights of four bits in bfloat16, `[experts, N, K]`.

    Of MXFP4 exact, also where the result is subnormal: values have two significant bits, and bfloat16 has the exponents
    of UE8M0.  Values of 2^128 and more become infinite, and those of a group whose scale is 255 are NaN.

    Of NVFP4 rounded: scale * factor and its product with the value in float32, then to bfloat16.  Where these are
    normal numbers, the error is at most 2^-8 of the value.
    """
    (values, of_values, *more), (experts, rows, half) = w, w[0].shape
    out = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=values.device)
    factors = more[0].reshape(experts, -1, 1) if more else None
    for expert in range(experts):  # one matrix at a time, for the float32 values
        data, scales = values[expert], of_values[expert]
        if factors is None:
            wide = formats.dequantize(data, scales.view(torch.float8_e8m0fnu), "mxfp4")
        else:
            wide = formats.dequantize(data, scales.float() * factors[expert], "nvfp4")
        out[expert].copy_(wide)
    return out


class _Packed(WeightFormat):
    """Weights of four bits.  The products have the bits of those of the widened weights.

    Attributes:
        name: in messages.
        group: columns that share a scale.
    """

    name = ""
    group = 0
    values = torch.uint8
    packed = 2
    tuned_as = torch.uint8
    unfused = "weights have four bits"

    @staticmethod
    def widen(w: Any, depth: int) -> torch.Tensor:
        return dequantize(w)

    def check(self, rounds: Rounds, w13: Any, w2: Any, interleaved: bool) -> tuple[Any, Any]:
        name, group, kind = self.name, self.group, self.kind
        for argument, w in (("w13", w13), ("w2", w2)):
            if type(w) is not kind:
                raise BadInput(argument, "another format", f"{name}, as the other weights are")
        if rounds.dtype is not torch.bfloat16:
            raise Unsupported(
                f"experts in {name}: the Buffer's {rounds.dtype} is not bfloat16, which has its exponents"
            )
        local, hidden = len(rounds.local_experts), rounds.hidden
        data: dict[str, Any] = {"device": rounds.device, "dtypes": (torch.uint8,)}
        scales: dict[str, Any] = {"device": rounds.device, "dtypes": self.of_scales}
        check_tensor("w2", w2.data, **data, shape=(local, hidden, None))
        intermediate = 2 * w2.data.shape[2]
        if hidden % group or intermediate == 0 or intermediate % group:
            raise Unsupported(f"experts in {name}: H = {hidden} or I = {intermediate} is no multiple of {group}")
        check_tensor("w13", w13.data, **data, shape=(local, 2 * intermediate, hidden // 2))
        check_tensor("w13", w13.scales, **scales, shape=(local, 2 * intermediate, hidden // group))
        check_tensor("w2", w2.scales, **scales, shape=(local, hidden, intermediate // group))
        for argument, w in (("w13", w13), ("w2", w2)):
            self.check_parts(argument, w)
            check_begin(argument, w.data, w.scales)
        return w13, w2

    def check_scales(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, w: torch.Tensor, w_scales: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if w_scales is None or not w_scales.is_contiguous():
            raise BadInput("w", "scales with gaps", "contiguous ones")
        if x_scales is not None:
            raise BadInput("x", "scales", f"none beside weights in {self.name}")
        return x_scales, w_scales

    def check_parts(self, argument: str, w: Any) -> None:
        for tensor, wanted in ((w.data, (torch.uint8,)), (w.scales, self.of_scales)):
            check_dense(argument, tensor)
            if tensor.dtype not in wanted or tensor.dim() != 3 or tensor.device != w.data.device:
                want = f"{' or '.join(map(str, wanted))} of three dimensions"
                raise BadInput(argument, f"{tuple(tensor.shape)} of {tensor.dtype}", want)
        experts, rows, half = w.data.shape
        if 2 * half % self.group or w.scales.shape != (experts, rows, 2 * half // self.group):
            got = f"values {tuple(w.data.shape)} and scales {tuple(w.scales.shape)}"
            raise BadInput(argument, got, f"[experts, N, K / 2] and [experts, N, K / {self.group}]")


class _Mxfp4(_Packed):
    kind, name, group, of_scales = Mxfp4, "MXFP4", 32, (torch.uint8, torch.float8_e8m0fnu)
    slow = "torch widens MXFP4 weights in every call: %s"


class _Nvfp4(_Packed):
    kind, name, group, of_scales = Nvfp4, "NVFP4", 16, (torch.float8_e4m3fn,)
    slow = "torch widens NVFP4 weights in every call: %s"

    def lacks_kernel(self, x: torch.Tensor, w2: Any) -> str:
        return "no kernel reads them" if x.is_cuda else ""

    def check_parts(self, argument: str, w: Any) -> None:
        super().check_parts(argument, w)
        experts, rows, _ = w.data.shape
        check_dense(argument, w.factors)
        shapes = (experts,), (experts, 1), (experts, rows)
        if w.factors.dtype is not torch.float32 or w.factors.device != w.data.device or w.factors.shape not in shapes:
            got = f"factors {tuple(w.factors.shape)} of {w.factors.dtype} on {w.factors.device}"
            raise BadInput(argument, got, f"float32 [experts] or [experts, N] on {w.data.device}")


MXFP4, NVFP4 = _Mxfp4(), _Nvfp4()
