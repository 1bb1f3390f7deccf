"""Formats of payloads: the one table of them, and the specification of their casts in plain torch.

Every operation below is one of float32, rounded to nearest even, with subnormal numbers kept; the order is the order of
the code.  So torch on CPUs and on GPUs leaves the same bits, and so do the kernels of moecomm/gpu/quantize_rows.py.  A
cast: amax = the largest magnitude of the columns that share a scale; the scale; each value scaled, rounded to nearest
even in its dtype, and saturated.  A NaN of the result is 0x7f in e4m3 and 0x7fc00000 in float32, whatever its sign was.

| format | scale | value, before it is rounded | the arithmetic of |
| --- | --- | --- | --- |
| fp8 | max(amax, 1e-4) / 448; ue8m0: the power of two above | x * (448 * (1 / amax)); x / scale | DeepEP, DeepGEMM |
| fp8_token | max(amax / 448, 1 / (448 * 512)) | x / scale | vLLM, dynamic_per_token_scaled_fp8_quant |
| fp8_tensor | given: `global_scale` | x * (1 / global_scale) | vLLM, static_scaled_fp8_quant |
| int8_token | amax / 127 | x * (127 / amax), of NaN 0 | vLLM, dynamic_scaled_int8_quant |
| int8_group | max(amax, 1e-10) / 127 | x / scale | vLLM, per_token_group_quant_int8, which truncates |
| mxfp8 | the power of two above amax / 448 | x / scale | TransformerEngine; mostly FlashInfer, mxfp8_quantize |
| nvfp4 | e4m3(amax * (g * (1 / 6))) | x * min(1 / (scale * (1 / g)), largest float32) | TransformerEngine |
| mxfp4 | the power of two above amax / 6 | x / scale | FlashInfer, fp4_quantize with UE8M0 scales |

quantize() has other rules for scales, by `scale_rule`:

| format, rule | scale | value, before it is rounded | the arithmetic of |
| --- | --- | --- | --- |
| mxfp8, floor | the power of two below amax, / 2^8 | x / scale | torchao's FLOOR, its default; microxcaling |
| mxfp4, floor | the power of two below amax, / 2^2 | x / scale | the same |
| int8_token, range | amax / 127.5, of zeros 2^-23 | x / scale | compressed-tensors, of symmetric INT8 in float32 |

With "floor" values of up to twice the largest saturate, scales are 2^-127 at least, and infinity makes a scale NaN, as
NaN does.  With "range" the value of -amax is -128 or -127, and that of amax 127.

The power of two above: the smallest that is not below; of mxfp8 and mxfp4 at least 2^-127, of infinity 2^127.  g is
`global_scale`, or 1.  Columns that a last group lacks count as zeros.

FlashInfer's mxfp8_quantize makes all values 0 whose scale is 2^-127, and gives groups with NaN this scale.

FlashInfer's fp4_quantize approximates the reciprocals of nvfp4, and does not where it is asked to equal
TransformerEngine.  Zero keeps its sign, as the instruction for e2m1 has it; TransformerEngine's reference drops it.

What becomes of special values:

* Finite values have finite scales and values.  A group of zeros has values of 0 with their signs, and the least scale
  that the table allows: 0 in int8_token and nvfp4, 2^-127 in mxfp8 and mxfp4.
* NaN makes the scale NaN, so dequantize() gives NaN for all columns that share it.  Their values are NaN in e4m3, 0 in
  int8, and 6 in e2m1, which has no NaN.  In fp8_tensor only the value itself is NaN.
* Infinity has the scale of the largest group: infinity in fp8_token, int8_token and int8_group, where finite values
  become 0 with their signs and infinity NaN (in int8, both 0); 2^127 in mxfp8 and mxfp4 and 448 in nvfp4, where it
  saturates, as in fp8_tensor.  In fp8 the scale is infinity, or NaN in ue8m0; finite values become 0, infinity NaN.
* Groups that are too small for their scale lose values, and stay finite.  amax of 127 * 2^-128 or less saturates all
  values but 0 in int8_token, to 127 or -128.  In nvfp4 a scale of 2^-10 or less is rounded to 0, and so are values in
  dequantize(), whatever their codes are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch

from moecomm.base.choices import Quantize, ScaleFormat
from moecomm.base.validation import check_dtype, check_name, check_real
from moecomm.errors import BadInput

_E4M3, _UE8M0, _FLOAT = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
_LARGEST = torch.finfo(_FLOAT).max
_BLOCK_ROWS, _BLOCK_COLUMNS = 128, 4  # scales in a block of the swizzled layout
_WARP_COLUMNS = 32  # of 4 bits are 16 bytes, the unit of rows that travel


class Format(NamedTuple):
    """Storage of the values of a row, and the groups of values that share a scale.

    Attributes:
        values: dtype of the tensor of values.  uint8 with 4 bits: two values a byte, the even column in the low half.
        bits: of a value.
        group: columns that share a scale; "row": all of a row; "tensor": all of the tensor, by a scale that is given.
        scales: dtype of a scale; None: no scale travels.
        largest: finite magnitude of a value.
        takes_global: `global_scale` has a meaning.
    """

    values: torch.dtype
    bits: int
    group: int | Literal["row", "tensor"]
    scales: torch.dtype | None
    largest: float
    takes_global: bool = False

    def value_columns(self, hidden: int) -> int:
        """Return the elements of a stored row of so many columns.  A row of 4-bit values has an even number."""
        return hidden * self.bits // (8 * self.values.itemsize)

    def scale_columns(self, hidden: int) -> int:
        """Return the scales of a row of so many columns; 0 if none travel."""
        if self.group == "tensor":
            return 0
        return 1 if self.group == "row" else -(-hidden // self.group)

    def row_bytes(self, hidden: int) -> int:
        """Return the bytes of the values of a row of so many columns."""
        return self.value_columns(hidden) * self.values.itemsize

    def scale_bytes(self, hidden: int) -> int:
        """Return the bytes of a row's scales, rounded up to 4-byte words, as they travel beside rows of bytes."""
        size = self.scale_columns(hidden) * self.scales.itemsize if self.scales is not None else 0
        return -(-size // 4) * 4

    def fits_warps(self, hidden: int) -> bool:
        """Return whether a warp can cast rows of so many columns: whole groups, and no scale for the whole row."""
        group = self.group if isinstance(self.group, int) else 1
        return self.group != "row" and hidden % max(group, _WARP_COLUMNS) == 0

    def scales_as(self, scale_format: ScaleFormat) -> torch.dtype | None:
        """Return the dtype of scales with this `scale_format`, which fp8 alone has a choice of."""
        return _UE8M0 if self == FORMATS["fp8"] and scale_format == "ue8m0" else self.scales


FORMATS: dict[str, Format] = {
    "fp8": Format(_E4M3, 8, 128, _FLOAT, 448.0),
    "fp8_token": Format(_E4M3, 8, "row", _FLOAT, 448.0),
    "fp8_tensor": Format(_E4M3, 8, "tensor", None, 448.0, takes_global=True),
    "int8_token": Format(torch.int8, 8, "row", _FLOAT, 127.0),
    "int8_group": Format(torch.int8, 8, 128, _FLOAT, 127.0),
    "mxfp8": Format(_E4M3, 8, 32, _UE8M0, 448.0),
    "nvfp4": Format(torch.uint8, 4, 16, _E4M3, 6.0, takes_global=True),
    "mxfp4": Format(torch.uint8, 4, 32, _UE8M0, 6.0),
}
if get_args(Quantize) != tuple(FORMATS):
    raise ImportError("moecomm/base/choices.py and moecomm/base/formats.py name different formats")


def check(
    x: torch.Tensor, name: object, scale_format: object, global_scale: Any
) -> tuple[Format, torch.Tensor | float | None]:
    """Return the format, and its global scale if it takes one: a float, or float32 `[1]` on the device of x.

    Raises BadInput, see quantize().  The value of a tensor is not looked at.
    """
    if x.dim() != 2:
        raise BadInput("x", f"{x.dim()} dimensions", "[T, H]")
    check_dtype("x", x.dtype, (torch.bfloat16, torch.float16, _FLOAT))
    return _check(name, scale_format, global_scale, x.shape[1], x.device)


def _check(
    name: object, scale_format: object, global_scale: Any, hidden: int, device: torch.device
) -> tuple[Format, torch.Tensor | float | None]:
    check_name("quantize", name, tuple(FORMATS))
    fmt = FORMATS[str(name)]
    check_name("scale_format", scale_format, get_args(ScaleFormat))
    if scale_format == "ue8m0" and name != "fp8" and fmt.scales is not _UE8M0:
        raise BadInput("scale_format", "'ue8m0'", f"'fp32' with quantize={name!r}, whose scales have one format")
    if hidden < 1 or hidden * fmt.bits % 8:
        raise BadInput("x", f"{hidden} columns", "an even number" if hidden else "one column or more")
    if global_scale is None:
        if fmt.group == "tensor":
            raise BadInput("global_scale", "None", f"the scale of all values, with quantize={name!r}")
        return fmt, 1.0 if fmt.takes_global else None
    if not fmt.takes_global:
        raise BadInput("global_scale", "a scale", f"None with quantize={name!r}")
    if not isinstance(global_scale, torch.Tensor):
        check_real("global_scale", global_scale, torch.finfo(_FLOAT).tiny, _LARGEST)
        return fmt, float(global_scale)
    check_dtype("global_scale", global_scale.dtype, (_FLOAT,))
    if global_scale.numel() != 1 or global_scale.device != device:
        got = f"{global_scale.numel()} values on {global_scale.device}"
        raise BadInput("global_scale", got, f"a number, or one value on {device}")
    return fmt, global_scale.reshape(1)


def quantize(
    x: torch.Tensor,
    name: str,
    *,
    scale_format: str = "fp32",
    global_scale: float | torch.Tensor | None = None,
    scale_rule: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cast rows; see this module for the arithmetic of each format.

    Nothing is copied between a GPU and the host, so CUDA graphs can capture it.

    Args:
        x: `[T, H]`, bfloat16, float16 or float32.
        name: of a format.  Formats with 4 bits take an even H.
        scale_format: of fp8: "fp32" or "ue8m0".
        global_scale: positive; a number, or float32 `[1]` on the device of x.  fp8_tensor: the scale of all values, and
            required.  nvfp4: the factor g of all values before they are scaled, such as 2688 / amax of the tensor.
            Rows that travel: the same on all ranks, so that amax is that of the tokens of all ranks.
        scale_rule: "floor" of mxfp8 and mxfp4, "range" of int8_token; None: the rule of the format, which is that of
            Buffer.dispatch(quantize=).

    Returns:
        Values `[T, value_columns(H)]` and scales `[T, scale_columns(H)]`, None for fp8_tensor, in the dtypes of the
        format.

    Raises:
        BadInput: an argument is not as above.
    """
    fmt, given = check(x, name, scale_format, global_scale)
    casts = _CASTS
    if scale_rule is not None:
        check_name("scale_rule", scale_rule, tuple(_RULES))
        casts = _RULES[scale_rule]
        if name not in casts:
            raise BadInput("scale_rule", repr(scale_rule), f"None with quantize={name!r}")
    hidden = x.shape[1]
    wide = x.float()
    if fmt.group == "tensor":
        assert given is not None
        return _e4m3(wide * _one(given, wide).reciprocal()), None
    group = hidden if fmt.group == "row" else fmt.group
    columns = fmt.scale_columns(hidden) * group
    wide = torch.nn.functional.pad(wide, (0, columns - hidden)).view(len(x), columns // group, group)
    amax = wide.abs().amax(dim=2, keepdim=True)  # NaN if one is
    scaled, scales = casts[name](wide, amax, fmt, scale_format, given)
    scaled = scaled.flatten(1)[:, :hidden]
    return _NARROW[fmt.values](scaled), scales.squeeze(2)


def dequantize(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    name: str,
    *,
    global_scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return value * scale, as float32 and then rounded to `dtype`; of nvfp4, value * (scale * (1 / global_scale)).

    Nothing is copied between a GPU and the host, so CUDA graphs can capture it.

    Args:
        rows: `[T, value_columns(H)]`, values that quantize() returned.
        scales: `[T, scale_columns(H)]`, in any dtype that the format has; None for fp8_tensor.
        name: of the format.
        global_scale: as given to quantize().
        dtype: of the result.

    Returns:
        `[T, H]`.

    Raises:
        BadInput: an argument is not as above, such as rows of layout "batched", which are flattened first.
    """
    check_name("quantize", name, tuple(FORMATS))
    for argument, tensor in (("rows", rows), ("scales", scales)):
        if tensor is not None and tensor.dim() != 2:
            raise BadInput(argument, f"{tensor.dim()} dimensions", "two, as flatten(0, 1) of batched ones has")
    hidden = rows.shape[1] * 8 // FORMATS[name].bits
    fmt, given = _check(name, "fp32", global_scale, hidden, rows.device)
    values = _e2m1_values(rows) if fmt.bits == 4 else rows.float()
    if fmt.group == "tensor":
        assert given is not None
        return (values * _one(given, values)).to(dtype)
    if scales is None or scales.shape != (len(rows), fmt.scale_columns(hidden)):
        shape = None if scales is None else tuple(scales.shape)
        raise BadInput("scales", shape, f"{len(rows), fmt.scale_columns(hidden)}")
    each = scales.float()
    if given is not None:
        each = each * _one(given, each).reciprocal()
    if fmt.group != "row":
        each = each.repeat_interleave(fmt.group, dim=1)[:, :hidden]
    return (values * each).to(dtype)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in the 128x4 layout of block-scaled GEMMs: blocks of 128 rows and 4 columns, 512 bytes each.

    The scale of row t and group j is at (t / 128) * 512 * ceil(S / 4) + (j / 4) * 512 + (t % 32) * 16 +
    ((t % 128) / 32) * 4 + j % 4.  Rows and columns that fill up the last blocks are 0.

    Args:
        scales: `[rows, S]` or `[E, rows, S]`, of a dtype of one byte.

    Returns:
        `[ceil(rows / 128) * 128 * ceil(S / 4) * 4]`, of each of E experts.
    """
    rows, columns = _check_swizzled(scales, scales.shape[-2:], (2, 3))
    padded = scales.contiguous().view(torch.uint8)
    if scales.shape[-2:] != (rows, columns):
        padded = scales.new_zeros((*scales.shape[:-2], rows, columns), dtype=torch.uint8)
        padded[..., : scales.shape[-2], : scales.shape[-1]] = scales.contiguous().view(torch.uint8)
    blocks = padded.view(*scales.shape[:-2], rows // 128, 4, 32, columns // 4, 4)
    return blocks.transpose(-4, -2).flatten(-5).view(scales.dtype)


def unswizzle(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return `[rows, columns]` of scales, or `[E, rows, columns]`, from what swizzle() returned of them."""
    padded_rows, padded_columns = _check_swizzled(scales, (rows, columns), (1, 2))
    if scales.shape[-1] != padded_rows * padded_columns:
        want = f"{padded_rows * padded_columns} of {rows} rows with {columns} each"
        raise BadInput("scales", f"{scales.shape[-1]} scales", want)
    blocks = scales.contiguous().view(torch.uint8)
    blocks = blocks.view(*scales.shape[:-1], padded_rows // 128, padded_columns // 4, 32, 4, 4)
    padded = blocks.transpose(-4, -2).reshape(*scales.shape[:-1], padded_rows, padded_columns)
    return padded[..., :rows, :columns].contiguous().view(scales.dtype)


def _check_swizzled(scales: torch.Tensor, size: tuple[int, ...] | torch.Size, dims: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of all blocks."""
    if scales.element_size() != 1:
        raise BadInput("scales", scales.dtype, "a dtype of one byte")
    if scales.dim() not in dims:
        raise BadInput("scales", f"{scales.dim()} dimensions", " or ".join(map(str, dims)))
    rows, columns = size
    return -(-rows // _BLOCK_ROWS) * _BLOCK_ROWS, -(-columns // _BLOCK_COLUMNS) * _BLOCK_COLUMNS


# In the functions below, x is [T, groups, group], and amax and scales are [T, groups, 1], all of them float32.


def _full(like: torch.Tensor, value: float) -> torch.Tensor:
    """Return a divisor or a dividend: with a plain number, torch multiplies with a reciprocal instead."""
    return torch.full_like(like, value)


def _one(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else like.new_full((1,), value)


def _canonical(values: torch.Tensor) -> torch.Tensor:
    """Return the values with all NaNs replaced by one."""
    return values.masked_fill(values.isnan(), torch.nan)


def _fp8(x: torch.Tensor, amax: torch.Tensor, fmt: Format, scale_format: str, _: Any) -> tuple[torch.Tensor, ...]:
    """Scale for e4m3, with the bits of quantize() in moecomm/dispatch/reference.py."""
    amax = amax.clamp(min=1e-4)
    scales = amax / _full(amax, fmt.largest)
    if scale_format == "fp32":
        return x * (amax.reciprocal() * fmt.largest), _canonical(scales)
    bits = scales.view(torch.int32)
    exponent = ((bits >> 23) + (bits & 0x7FFFFF != 0)).clamp(max=255)
    up = (exponent.int() << 23).view(_FLOAT).reciprocal()
    return x * up, exponent.to(torch.uint8).view(_UE8M0)


def _fp8_token(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    scales = (amax / _full(amax, fmt.largest)).clamp(min=1 / (448 * 512))
    return x / scales, _canonical(scales)


def _int8_token(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    largest = _full(amax, fmt.largest)
    return x * (largest / amax), _canonical(amax / largest)  # zeros become NaN, and _int8() makes that 0


def _int8_group(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    scales = amax.clamp(min=1e-10) / _full(amax, fmt.largest)
    return x / scales, _canonical(scales)


def _mx(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    least = amax / _full(amax, fmt.largest)
    bits = least.view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    exponent = exponent + (fraction > torch.where(exponent == 0, 0x400000, 0))  # 0 stands for 2^-127, 1 for 2^-126
    exponent = torch.where(least.isinf(), 254, exponent.clamp(max=255))  # 255 stands for NaN
    scales = exponent.to(torch.uint8).view(_UE8M0)
    return x * scales.float().reciprocal(), scales


def _mx_floor(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    exponent = ((amax.view(torch.int32) >> 23) - math.frexp(fmt.largest)[1] + 1).clamp(min=0)
    scales = torch.where(amax.isfinite(), exponent, 255).to(torch.uint8).view(_UE8M0)
    return x * scales.float().reciprocal(), scales


def _int8_range(x: torch.Tensor, amax: torch.Tensor, fmt: Format, *_: Any) -> tuple[torch.Tensor, ...]:
    scales = amax / _full(amax, fmt.largest + 0.5)
    scales = scales.masked_fill(scales == 0, torch.finfo(_FLOAT).eps)
    return x / scales, _canonical(scales)


def _nvfp4(
    x: torch.Tensor, amax: torch.Tensor, fmt: Format, _: str, given: float | torch.Tensor
) -> tuple[torch.Tensor, ...]:
    factor = _one(given, x)
    scales = _e4m3(amax * (factor * _full(factor, fmt.largest).reciprocal()))
    return x * (scales.float() * factor.reciprocal()).reciprocal().clamp(max=_LARGEST), scales


_CASTS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "fp8": _fp8,
    "fp8_token": _fp8_token,
    "int8_token": _int8_token,
    "int8_group": _int8_group,
    "mxfp8": _mx,
    "nvfp4": _nvfp4,
    "mxfp4": _mx,
}
_RULES: dict[str, dict[str, Callable[..., tuple[torch.Tensor, ...]]]] = {
    "floor": {"mxfp8": _mx_floor, "mxfp4": _mx_floor},
    "range": {"int8_token": _int8_range},
}


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return _canonical(values).clamp(-448.0, 448.0).to(_E4M3)


def _int8(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp(-128.0, 127.0).masked_fill(values.isnan(), 0.0).to(torch.int8)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, at most 6, NaN as 6; pack two in a byte."""
    size = values.abs()
    codes = (size > 0.25).to(torch.uint8)  # between 0 and 0.5, and so on; a tie goes to the even code
    codes += (size >= 0.75).to(torch.uint8) + (size > 1.25) + (size >= 1.75) + (size > 2.5) + (size >= 3.5)
    codes += size > 5.0
    codes |= values.signbit().to(torch.uint8) << 3
    codes = torch.where(values.isnan(), 7, codes)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _e2m1_values(rows: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((rows & 15, rows >> 4), dim=2).flatten(1).int()
    exponent, fraction = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)  # of the magnitude
    sizes = quarters.float() * 0.25
    return torch.where(codes < 8, sizes, -sizes)


_NARROW: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    _E4M3: _e4m3,
    torch.int8: _int8,
    torch.uint8: _e2m1,
}
