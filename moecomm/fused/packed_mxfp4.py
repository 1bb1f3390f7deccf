"""MXFP4 weights packed for FP8 rows: the tensor cores multiply them as e4m3."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moecomm.base.arrays import check_tensor, has_memory
from moecomm.base.choices import Quantize
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels
from moecomm.fused.fp4 import MXFP4, Mxfp4
from moecomm.fused.weight_format import WeightFormat, check_begin, described, not_hopper
from moecomm.rounds.rounds import Rounds

_MX_GROUP, _GROUPS = 32, 4  # columns that share a scale; such groups of 128 columns
_LANES, _VALUES = 4, 8  # lanes that share a row; values of a word
_MOST_RISE = 11  # kLowTable and kHighTable of csrc/gemm/packed_scaled.cuh, times 2^11, are at most 6 * 2^6 = 384
_LEAST_EXPONENT = -5  # of a group with rise 0
_NAN = 255
# Bits of the magnitude and of the sign of each of the 8 values of a word: see packed_scaled.cuh.
_MAGNITUDES = tuple(4 * i for i in range(_VALUES))
_SIGNS = (7, 15, 23, 31, 3, 11, 19, 27)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_HALVES = (0, 1, 2, 3, 4, 4, 5)  # code of a magnitude up to 3, by its multiple of 0.5


class PackedMxfp4(NamedTuple):
    """MXFP4 weights in the order of the FP8 tensor cores; `pack_mxfp4` makes them.

    Attributes:
        data: int32 `[experts, N, 16 * ceil(K / 128)]`, eight values each.
        scales: int32 `[experts, ceil(K / 128), N]`, one for 128 columns of a row: a power of two, and four smaller ones
            for 32 columns each, relative to it.
    """

    data: torch.Tensor
    scales: torch.Tensor


@torch.no_grad()
def pack_mxfp4(w: tuple[torch.Tensor, torch.Tensor]) -> PackedMxfp4:
    """Pack MXFP4 weights for FP8 rows.  Do it once, when weights are loaded.

    They are for few rows an expert, as in decoding.  From 64 rows an expert on, FP8 weights are as fast or faster.

    No value changes if no scale is below 2^-11 of the largest scale of the same row and 128 columns.  Values of smaller
    scales are rounded to multiples of 2^-12 of that largest scale, half to even: the error is at most 2^-13 of it.
    Groups of 32 columns that are 0 do not count.  A scale of 255 (NaN) makes all sums NaN that its 128 columns are part
    of.

    Args:
        w: `moecomm.fused.Mxfp4`, or such a pair.

    Returns:
        The packed weights, on the same device.

    Raises:
        BadInput: no pair of values and scales as in Mxfp4.
    """
    if not isinstance(w, tuple) or len(w) != 2:
        raise BadInput("w", type(w).__name__, "Mxfp4(data, scales)")
    w = Mxfp4(*w)
    MXFP4.check_parts("w", w)
    if not all(map(has_memory, w)):
        raise BadInput("w", "a tensor without memory", "one that has some")
    w = Mxfp4(*(tensor.resolve_neg() for tensor in w))
    experts, rows, half = w.data.shape
    steps = -(-2 * half // GROUP)
    data = torch.zeros(experts, rows, steps * _GROUPS * _LANES, dtype=torch.int32, device=w.data.device)
    scales = torch.empty(experts, steps, rows, dtype=torch.int32, device=w.data.device)
    for expert in range(experts):  # one matrix at a time, for the codes
        _pack(w.data[expert], w.scales[expert].view(torch.uint8), data[expert], scales[expert])
    return PackedMxfp4(data, scales)


def _pack(values: torch.Tensor, of_values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Pack one matrix, `[N, K / 2]` and `[N, K / 32]`."""
    rows, steps, device = len(values), len(scales), values.device
    codes = torch.zeros(rows, steps * GROUP, dtype=torch.uint8, device=device)
    codes[:, : 2 * values.shape[1]] = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    codes = codes.view(rows, steps, _GROUPS, _MX_GROUP)
    exponents = torch.zeros(rows, steps * _GROUPS, dtype=torch.int32, device=device)
    exponents[:, : of_values.shape[1]] = of_values
    exponents = exponents.view(rows, steps, _GROUPS)
    is_nan = (exponents == _NAN).any(dim=2)
    codes.masked_fill_(is_nan[:, :, None, None], 0)
    counts = ((codes & 7) != 0).any(dim=3) & ~is_nan[:, :, None]
    largest = torch.where(counts, exponents, 0).amax(dim=2)
    base = (largest - _MOST_RISE - _LEAST_EXPONENT).clamp(min=1)
    rise = torch.where(counts, exponents - base[:, :, None] - _LEAST_EXPONENT, 0)
    if bool((rise < 0).any()):
        lower = torch.exp2(rise.clamp(max=-1).float())[..., None]  # where rise is negative, the only values that count
        wide = torch.tensor(_E2M1, device=device)[(codes & 7).int()] * lower
        halves = torch.tensor(_OF_HALVES, dtype=torch.uint8, device=device)[(2 * wide).round().int()]
        codes = torch.where((rise < 0)[..., None], codes & 8 | halves, codes)
        rise = rise.clamp(min=0)
    base = torch.where(is_nan, _NAN, base)
    word = (base & 15) << 20 | (base >> 4) << 28
    for group in range(_GROUPS):
        word |= rise[:, :, group] << 8 * group
    scales.copy_(word.T)
    # [rows, steps, groups, half of a group, lane, 4] -> [rows, steps, lane, group, 8]
    of_lanes = codes.view(rows, steps, _GROUPS, 2, _LANES, 4).permute(0, 1, 4, 2, 3, 5).reshape(rows, -1, _VALUES).int()
    word = torch.zeros(of_lanes.shape[:-1], dtype=torch.int32, device=device)
    for i in range(_VALUES):
        word |= (of_lanes[:, :, i] & 7) << _MAGNITUDES[i] | (of_lanes[:, :, i] >> 3) << _SIGNS[i]
    data.copy_(word)


def dequantize(w: tuple[torch.Tensor, torch.Tensor], depth: int | None = None) -> torch.Tensor:
    """Return packed weights in bfloat16, `[experts, N, K]`, K the next multiple of 128, or `depth`.

    Exact, also where the result is subnormal.  Values of 2^128 and more become infinite.
    """
    (words, of_words), (experts, rows, _) = w, w[0].shape
    steps = of_words.shape[1]
    out = torch.empty(experts, rows, steps * GROUP, dtype=torch.bfloat16, device=words.device)
    magnitudes = torch.tensor(_E2M1, device=words.device)
    for expert in range(experts):
        data, scales = words[expert], of_words[expert].T
        base = (scales >> 20 & 15) | (scales >> 28 & 15) << 4
        values = [
            torch.where((data >> _SIGNS[i] & 1) != 0, -1.0, 1.0) * magnitudes[data >> _MAGNITUDES[i] & 7]
            for i in range(_VALUES)
        ]
        wide = torch.stack(values, dim=-1).view(rows, steps, _LANES, _GROUPS, 2, 4).permute(0, 1, 3, 4, 2, 5)
        rise = torch.stack([scales >> 8 * group & 15 for group in range(_GROUPS)], dim=-1) + _LEAST_EXPONENT
        wide = wide.reshape(rows, steps, _GROUPS, _MX_GROUP) * torch.exp2(rise.float())[..., None]
        factor = (base << 23).view(torch.float32)  # 255: infinity, times 0
        out[expert].copy_((wide * factor[..., None, None]).reshape(rows, -1))
    return out if depth is None else out[:, :, :depth]


class _PackedMxfp4(WeightFormat):
    kind, values, packed = PackedMxfp4, torch.int32, 8
    quantize: Quantize | None = "fp8"
    product = kernels.FP8
    tuned_as = torch.uint8
    unfused = "weights have four bits"
    widen = staticmethod(dequantize)

    def check(self, rounds: Rounds, w13: Any, w2: Any, interleaved: bool) -> tuple[Any, Any]:
        for argument, w in (("w13", w13), ("w2", w2)):
            if type(w) is not PackedMxfp4:
                raise BadInput(argument, "another format", "packed MXFP4, as the other weights are")
        local, hidden = len(rounds.local_experts), rounds.hidden
        about: dict[str, Any] = {"device": rounds.device, "dtypes": (torch.int32,)}
        check_tensor("w13", w13.data, **about, shape=(local, None, _words(hidden)))
        intermediate = w13.data.shape[1] // 2
        check_tensor("w13", w13.data, **about, shape=(local, 2 * intermediate, _words(hidden)))
        check_tensor("w2", w2.data, **about, shape=(local, hidden, _words(intermediate)))
        check_tensor("w13", w13.scales, **about, shape=(local, -(-hidden // GROUP), 2 * intermediate))
        check_tensor("w2", w2.scales, **about, shape=(local, -(-intermediate // GROUP), hidden))
        for argument, w in (("w13", w13), ("w2", w2)):
            check_begin(argument, w.data, w.scales)
            check_begin(argument, w.scales)
        if why := _lacks(rounds, local, hidden, intermediate):
            raise Unsupported(f"experts with packed MXFP4 weights: {why}")
        return w13, w2

    def lacks_kernel(self, x: torch.Tensor, w2: Any) -> str:
        return ""  # check() has refused such weights

    def check_scales(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, w: torch.Tensor, w_scales: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        shape = (*x.shape[:-1], -(-x.shape[-1] // GROUP))
        if x_scales is None or x.dtype is not kernels.FP8:
            raise BadInput("x", described(x), "Fp8(data, scales) of e4m3 beside packed MXFP4 weights")
        if x_scales.shape != shape or x_scales.dtype != torch.float32 or x_scales.device != x.device:
            raise BadInput("x", f"scales {described(x_scales)}", f"float32 {shape} on {x.device}")
        if not x_scales.is_contiguous() and x_scales.dim() == 3:
            raise BadInput("x", "scales with gaps", "contiguous ones; of x [rows, K] also by column")
        if w_scales is None or not w_scales.is_contiguous() or (w.is_cuda and w_scales.data_ptr() % 16):
            raise BadInput("w", "scales with gaps", "contiguous ones that begin at a multiple of 16")
        return x_scales, w_scales

    def check_parts(self, argument: str, w: Any) -> None:
        data, scales = w
        for tensor in (data, scales):
            if tensor.dtype is not torch.int32 or tensor.dim() != 3 or tensor.device != data.device:
                raise BadInput(argument, f"{tuple(tensor.shape)} of {tensor.dtype}", "int32 of three dimensions")
        experts, rows, words = data.shape
        if words % (_GROUPS * _LANES) or scales.shape != (experts, words // (_GROUPS * _LANES), rows):
            got = f"values {tuple(data.shape)} and scales {tuple(scales.shape)}"
            raise BadInput(argument, got, "[experts, N, 16 ceil(K / 128)] and [experts, ceil(K / 128), N]")


PACKED_MXFP4 = _PackedMxfp4()


def _words(depth: int) -> int:
    return -(-depth // GROUP) * _GROUPS * _LANES


def _lacks(rounds: Rounds, local: int, hidden: int, intermediate: int) -> str:
    """Return why grouped_gemm cannot compute such experts on this device; empty if it can."""
    if rounds.dtype not in kernels.TYPES:
        return f"the Buffer's {rounds.dtype} is neither bfloat16 nor float16"
    if hidden % _MX_GROUP or intermediate == 0 or intermediate % _MX_GROUP:
        return f"H = {hidden} or I = {intermediate} is no multiple of {_MX_GROUP}"
    if local > kernels.MOST_GROUPS:
        return f"a rank has {local} experts, more than {kernels.MOST_GROUPS}"
    return not_hopper(rounds.device.index) if rounds.device.type == "cuda" else ""
