"""MXFP4 weights packed for FP8 rows: FP8 weights in four bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from moecomm.base.arrays import check_tensor, has_memory
from moecomm.base.choices import Quantize
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels
from moecomm.fused.fp4 import MXFP4, Mxfp4
from moecomm.fused.fp8 import Fp8
from moecomm.fused.weight_format import WeightFormat, check_begin, described, not_hopper
from moecomm.rounds.rounds import Rounds

_MX_GROUP, _GROUPS = 32, 4  # columns that share a scale; such groups of 128 columns
_WORDS, _VALUES = 16, 8  # words of 128 columns; values of a word
_TOGETHER = 8  # rows whose words of 128 columns lie together
_MOST_RISE, _NAN_RISE = 14, 15  # of a group: its values are e2m1 * 2^(rise - 8), at most 6 * 2^6 = 384
_OF_RISE = 8  # so much is subtracted from a rise
_NAN = 255
# Bits of the magnitude and of the sign of each of the 8 values of a word: see csrc/gemm/widen.cuh.
_MAGNITUDES = tuple(4 * i for i in range(_VALUES))
_SIGNS = (7, 15, 23, 31, 3, 11, 19, 27)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_HALVES = (0, 1, 2, 3, 4, 4, 5)  # code of a magnitude up to 3, by its multiple of 0.5


class PackedMxfp4(NamedTuple):
    """FP8 weights in four bits, for FP8 rows; `pack_mxfp4` makes them of MXFP4 weights.

    They stand for e4m3 values with a scale for each 128 rows and 128 columns (see `Fp8`), and products have the bits of
    those of such weights.

    Attributes:
        data: int32 `[experts, N, 16 * ceil(K / 128)]`, eight values each.  The order of an expert's
            words is `[N / 8, ceil(K / 128), 8 rows, 16 words]`: take whole experts of it, no rows or columns.
        scales: int32 `[experts, ceil(K / 128), N]`, one for 128 columns of a row: the scale of its block, a power of
            two, and four powers of two for 32 columns each, relative to it.
    """

    data: torch.Tensor
    scales: torch.Tensor


@torch.no_grad()
def pack_mxfp4(w: tuple[torch.Tensor, torch.Tensor]) -> PackedMxfp4:
    """Pack MXFP4 weights for FP8 rows.  Do it once, when weights are loaded.

    No value changes if no scale is below 2^-14 of the largest scale of the same block of 128 rows and 128 columns.
    Values of smaller scales are rounded to multiples of 2^-15 of that largest scale, half to even: the error is at most
    2^-16 of it.  Groups of 32 columns that are 0 do not count.  A scale of 255 (NaN) makes all sums of its row NaN.

    Args:
        w: `moecomm.fused.Mxfp4`, or such a pair.

    Returns:
        The packed weights, on the same device.

    Raises:
        BadInput: no pair of values and scales as in Mxfp4; N not a multiple of 8.
    """
    if not isinstance(w, tuple) or len(w) != 2:
        raise BadInput("w", type(w).__name__, "Mxfp4(data, scales)")
    w = Mxfp4(*w)
    MXFP4.check_parts("w", w)
    if not all(map(has_memory, w)):
        raise BadInput("w", "a tensor without memory", "one that has some")
    w = Mxfp4(*(tensor.resolve_neg() for tensor in w))
    experts, rows, half = w.data.shape
    if rows % _TOGETHER:
        raise BadInput("w", described(w.data), f"N a multiple of {_TOGETHER}")
    steps = -(-2 * half // GROUP)
    data = torch.empty(experts, rows, steps * _WORDS, dtype=torch.int32, device=w.data.device)
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
    is_nan = exponents == _NAN
    counts = ((codes & 7) != 0).any(dim=3) & ~is_nan
    # Exponents of the factors, biased as a float's: of a normal number, also below the smallest scale, 2^-127.
    largest = pad(torch.where(counts, exponents, 0).amax(dim=2), (0, 0, 0, -rows % GROUP))
    factor = (largest.view(-1, GROUP, steps).amax(dim=1) - (_MOST_RISE - _OF_RISE)).clamp(min=1)
    factor = factor.repeat_interleave(GROUP, dim=0)[:rows]
    rise = torch.where(counts, exponents - factor[:, :, None] + _OF_RISE, 0)
    if bool((rise < 0).any()):
        lower = torch.exp2(rise.clamp(max=-1).float())[..., None]  # where rise is negative, the only values that count
        wide = torch.tensor(_E2M1, device=device)[(codes & 7).int()] * lower
        halves = torch.tensor(_OF_HALVES, dtype=torch.uint8, device=device)[(2 * wide).round().int()]
        codes = torch.where((rise < 0)[..., None], codes & 8 | halves, codes)
        rise = rise.clamp(min=0)
    rise = torch.where(is_nan, _NAN_RISE, rise)
    word = factor << 23
    for group in range(_GROUPS):
        word |= rise[:, :, group] << 4 * group
    scales.copy_(word.T)
    of_words = codes.view(rows, -1, _VALUES).int()
    word = torch.zeros(of_words.shape[:-1], dtype=torch.int32, device=device)
    for i in range(_VALUES):
        word |= (of_words[:, :, i] & 7) << _MAGNITUDES[i] | (of_words[:, :, i] >> 3) << _SIGNS[i]
    # 128 columns of eight rows lie together.
    data.view(-1, steps, _TOGETHER, _WORDS).copy_(word.view(-1, _TOGETHER, steps, _WORDS).transpose(1, 2))


def unpack(w: tuple[torch.Tensor, torch.Tensor], depth: int | None = None) -> Fp8:
    """Return the FP8 weights that packed ones stand for, `[experts, N, K]`, K the next multiple of 128, or `depth`."""
    (words, of_words), (experts, rows, _) = w, w[0].shape
    steps, device = of_words.shape[1], words.device
    depth = steps * GROUP if depth is None else depth
    data = torch.empty(experts, rows, depth, dtype=torch.float8_e4m3fn, device=device)
    rises = torch.arange(_MOST_RISE + 1, device=device) - _OF_RISE
    table = torch.tensor(_E2M1, device=device) * torch.exp2(rises.float())[:, None]
    of_nan = torch.full_like(table[:1], float("nan"))
    magnitudes = torch.cat((table, of_nan)).to(torch.float8_e4m3fn).view(torch.uint8)  # of a rise
    for expert in range(experts):
        matrix = words[expert].view(-1, steps, _TOGETHER, _WORDS).transpose(1, 2).reshape(rows, steps * _GROUPS, -1)
        scales = of_words[expert].T
        rise = torch.stack([scales >> 4 * group & 15 for group in range(_GROUPS)], dim=-1).view(rows, -1, 1)
        columns = [
            magnitudes[rise, matrix >> _MAGNITUDES[i] & 7] | (matrix >> _SIGNS[i] & 1).to(torch.uint8) << 7
            for i in range(_VALUES)
        ]
        wide = torch.stack(columns, dim=-1).view(rows, -1)
        data[expert].view(torch.uint8).copy_(wide[:, :depth])
    factors = (of_words[:, :, ::GROUP] & -(1 << 16)).view(torch.float32)
    return Fp8(data, factors.transpose(1, 2).contiguous())


class _PackedMxfp4(WeightFormat):
    kind, values, of_scales, packed = PackedMxfp4, torch.int32, (torch.int32,), 8
    quantize: Quantize | None = "fp8"
    product = kernels.FP8
    tuned_as = kernels.FP8
    travels: Mapping[torch.dtype, str] = {torch.int32: "fp8"}
    widen = staticmethod(unpack)

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
        if words % _WORDS or scales.shape != (experts, words // _WORDS, rows):
            got = f"values {tuple(data.shape)} and scales {tuple(scales.shape)}"
            raise BadInput(argument, got, "[experts, N, 16 ceil(K / 128)] and [experts, ceil(K / 128), N]")


PACKED_MXFP4 = _PackedMxfp4()


def _words(depth: int) -> int:
    return -(-depth // GROUP) * _WORDS


def _lacks(rounds: Rounds, local: int, hidden: int, intermediate: int) -> str:
    """Return why grouped_gemm cannot compute such experts on this device; empty if it can."""
    if rounds.dtype not in kernels.TYPES:
        return f"the Buffer's {rounds.dtype} is neither bfloat16 nor float16"
    if hidden % _MX_GROUP or intermediate == 0 or intermediate % _MX_GROUP:
        return f"H = {hidden} or I = {intermediate} is no multiple of {_MX_GROUP}"
    if local > kernels.MOST_GROUPS:
        return f"a rank has {local} experts, more than {kernels.MOST_GROUPS}"
    return not_hopper(rounds.device.index) if rounds.device.type == "cuda" else ""
