"""Casts to each format, against brute force: numpy's float32, and the nearest of all numbers that a dtype has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from moecomm import BadInput
from moecomm.base import formats
from moecomm.base.formats import FORMATS, dequantize, quantize, swizzle, unswizzle
from moecomm.dispatch import reference

Array = np.ndarray
GLOBAL = {"fp8_tensor": 0.37, "nvfp4": 1234.5}
# Magnitudes by code.  e4m3: exponents 0 to 15, biased by 7, with three bits of fraction; the last code is NaN.
E4M3 = np.array([(1 + f / 8) * 2.0 ** (e - 7) if e else f / 8 * 2.0**-6 for e in range(16) for f in range(8)][:-1])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INT8 = np.arange(129.0)


def nearest(values: Array, known: Array) -> Array:
    """Return codes of the nearest magnitudes, even ones for ties, and the largest beyond; 0 of NaN."""
    seen, where = np.unique(
        np.minimum(np.nan_to_num(np.abs(values.astype(np.float64))), known[-1]), return_inverse=True
    )
    far = np.abs(seen[:, None] - known)
    code = far.argmin(axis=1)
    above = np.minimum(code + 1, len(known) - 1)
    rows = np.arange(len(seen))
    code += (far[rows, above] == far[rows, code]) & (code % 2 == 1) & (above > code)
    return code[where].reshape(values.shape)


def e4m3(values: Array) -> Array:
    codes = nearest(values, E4M3) | np.signbit(values) << 7
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def int8(values: Array) -> Array:
    codes = nearest(values, INT8) * np.where(np.signbit(values), -1, 1)
    return np.where(np.isnan(values), 0, np.minimum(codes, 127)).astype(np.int8)


def e2m1(values: Array) -> Array:
    return np.where(np.isnan(values), 7, nearest(values, E2M1) | np.signbit(values) << 3).astype(np.uint8)


def power_above(value: float) -> int:
    """Return the biased exponent of the smallest power of two that is not below."""
    if not math.isfinite(value):
        return 254 if value > 0 else 255
    fraction, exponent = math.frexp(value)
    return 0 if value == 0 else max(exponent - (fraction == 0.5) + 127, 0)


def f32(value: float) -> np.float32:
    return np.float32(value)


def floor_of(amax: Array, largest: float) -> Array:
    """Return biased exponents of the power of two below, over that below the largest value; at least 0."""
    seen, where = np.unique(amax, return_inverse=True)
    found = [
        max(math.frexp(float(value))[1] - math.frexp(largest)[1] + 127, 0) if math.isfinite(value) else 255
        for value in seen
    ]
    return np.where(seen == 0, 0, np.array(found))[where].reshape(amax.shape)


def cast_group(name: str, x: Array, g: float, rule: str | None = None) -> tuple[Array, Array | None]:
    """Cast [T, n] float32, of which a row is one group.  Return codes [T, n], and scales [T, 1] as they are stored."""
    amax = np.abs(x).max(axis=1, keepdims=True)
    if rule == "range":
        scale = amax / f32(127.5)
        scale = np.where(scale == 0, f32(2**-23), scale)
        return int8(x / scale), scale
    if rule == "floor":
        stored = floor_of(amax, FORMATS[name].largest)
        up = np.where(stored == 255, np.nan, 2.0 ** (127.0 - stored)).astype(np.float32)
        return (e4m3 if name == "mxfp8" else e2m1)(x * up), stored.astype(np.uint8)
    if name == "fp8_tensor":
        return e4m3(x * (f32(1) / f32(g))), None
    if name == "fp8_token":
        scale = np.maximum(amax / f32(448), f32(1) / f32(448 * 512))
        return e4m3(x / scale), scale
    if name == "int8_token":
        up = np.where(amax == 0, f32(0), f32(127) / amax)
        return int8(x * up), amax / f32(127)
    if name == "int8_group":
        scale = np.maximum(amax, f32(1e-10)) / f32(127)
        return int8(x / scale), scale
    if name == "nvfp4":
        stored = e4m3(amax * (f32(g) * (f32(1) / f32(6))))
        scale = np.where(stored == 0x7F, np.nan, E4M3[np.minimum(stored, 126)]).astype(np.float32)
        return e2m1(x * np.minimum(f32(1) / (scale * (f32(1) / f32(g))), np.finfo(np.float32).max)), stored
    least, where = np.unique(amax / f32(FORMATS[name].largest), return_inverse=True)
    stored = np.array([power_above(float(value)) for value in least])[where].reshape(amax.shape)
    up = np.where(stored == 255, np.nan, 2.0 ** (127.0 - stored)).astype(np.float32)
    return (e4m3 if name == "mxfp8" else e2m1)(x * up), stored.astype(np.uint8)


@np.errstate(all="ignore")
def cast(name: str, x: torch.Tensor, g: float = 1.0, rule: str | None = None) -> tuple[Array, Array | None]:
    """Cast rows of any size: groups one by one."""
    wide, each = x.float().numpy(), FORMATS[name].group
    step = each if isinstance(each, int) else x.shape[1]
    made = [cast_group(name, wide[:, at : at + step], g, rule) for at in range(0, x.shape[1], step)]
    codes = np.concatenate([codes for codes, _ in made], axis=1)
    scales = [scale for _, scale in made if scale is not None]
    if FORMATS[name].bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes, np.concatenate(scales, axis=1) if scales else None


def check(name: str, x: torch.Tensor, g: float | None = None, rule: str | None = None) -> None:
    rows, scales = quantize(x, name, global_scale=g, scale_rule=rule)
    codes, wanted = cast(name, x, 1.0 if g is None else g, rule)
    fmt = FORMATS[name]
    assert rows.shape == (len(x), fmt.value_columns(x.shape[1])) and rows.dtype == fmt.values and rows.is_contiguous()
    assert np.array_equal(rows.view(torch.uint8).numpy(), codes.view(np.uint8))
    assert (scales is None) == (wanted is None)
    if scales is not None and wanted is not None:
        assert scales.shape == (len(x), fmt.scale_columns(x.shape[1])) and scales.dtype == fmt.scales
        if fmt.scales == torch.float32:
            wanted = np.where(np.isnan(wanted), f32(np.nan), wanted)
        assert np.array_equal(
            scales.contiguous().view(torch.uint8).numpy(), np.ascontiguousarray(wanted).view(np.uint8)
        )


def every_bf16() -> Iterator[tuple[str, torch.Tensor]]:
    """Every value there is: each alone in a group, and beside others, which are ordinary, large and small."""
    bits = torch.arange(1 << 16).to(torch.int32)
    values = bits.to(torch.uint16).view(torch.bfloat16)
    for which, others in (("alone", []), ("1.7", [-1.7, 0.3]), ("1e30", [1e30, -7e28]), ("1e-30", [1e-30, 1e-38])):
        beside = torch.tensor([0.0, *others, 0.0, 0.0][:3]).bfloat16().expand(len(values), -1)
        yield which, torch.cat((beside, values.unsqueeze(1)), dim=1)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8"])
def test_every_bf16(name: str) -> None:
    for _, x in every_bf16():
        check(name, x, GLOBAL.get(name))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_any_size(name: str, dtype: torch.dtype) -> None:
    """Ordinary values, and any bits at all; with groups that are not full, and without rows."""
    g = torch.Generator().manual_seed(3)
    for tokens, hidden in ((0, 64), (1, 2), (3, 128), (64, 300), (5, 1030)):
        ordinary = torch.randn(tokens, hidden, generator=g) * torch.logspace(-4, 3, hidden)
        check(name, ordinary.to(dtype), GLOBAL.get(name))
        bits = torch.randint(0, 256, (tokens, hidden * dtype.itemsize), generator=g, dtype=torch.uint8)
        check(name, bits.view(dtype), GLOBAL.get(name))
        ties = torch.randint(-14, 15, (tokens, hidden), generator=g) / 4  # halfway between two of e2m1, and int8
        check(name, ties.to(dtype), GLOBAL.get(name))
    if name in ("nvfp4", "fp8_tensor"):
        for scale in (2.0**-126, 3e38, 1.0):
            check(name, ordinary.to(dtype), scale)
    if name == "nvfp4":
        check(name, ordinary.to(dtype))


@pytest.mark.parametrize(("name", "rule"), [("mxfp8", "floor"), ("mxfp4", "floor"), ("int8_token", "range")])
def test_other_rules_for_scales(name: str, rule: str) -> None:
    for _, x in every_bf16():
        check(name, x, rule=rule)
    g = torch.Generator().manual_seed(3)
    for tokens, hidden in ((0, 64), (3, 128), (64, 300)):
        check(name, torch.randn(tokens, hidden, generator=g) * torch.logspace(-4, 3, hidden), rule=rule)
        check(
            name,
            torch.randint(0, 256, (tokens, hidden * 4), generator=g, dtype=torch.uint8).view(torch.float32),
            rule=rule,
        )
    x = torch.tensor([[1.75 * 2**9, 1.0, *[0.0] * 30]])
    values, scales = quantize(x, name, scale_rule=rule)
    assert scales is not None
    if rule == "floor":  # the power of two below amax, over that below the largest value
        assert scales.float().item() == (2.0 if name == "mxfp8" else 2.0**7)
        assert dequantize(values, scales, name)[0, 0] == (896 if name == "mxfp8" else 768), "saturated where it is more"
    else:
        assert quantize(-x, name, scale_rule=rule)[0][0, 0] == -128 and values[0, 0] == 127


@pytest.mark.parametrize("name", FORMATS)
def test_finite_values_stay_finite(name: str) -> None:
    for _, x in every_bf16():
        finite = x[x.isfinite().all(dim=1)]
        rows, scales = quantize(finite, name, global_scale=GLOBAL.get(name))
        assert scales is None or scales.float().isfinite().all()
        assert FORMATS[name].values == torch.uint8 or rows.float().isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_nan_reaches_all_that_share_its_scale(name: str) -> None:
    each = FORMATS[name].group
    x = torch.ones(3, 256)
    x[1, 70] = -math.nan
    rows, scales = quantize(x, name, global_scale=GLOBAL.get(name))
    found = dequantize(rows, scales, name, global_scale=GLOBAL.get(name)).isnan()
    wanted = torch.zeros(3, 256, dtype=torch.bool)
    first, last = {"row": (0, 256), "tensor": (70, 71)}.get(each) or (70 // each * each, 70 // each * each + each)
    wanted[1, first:last] = True
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_is_that_of_the_specification(scale_format: str) -> None:
    g = torch.Generator().manual_seed(4)
    for _, x in [*every_bf16(), ("sizes", torch.randn(9, 300, generator=g))]:
        rows, scales = quantize(x, "fp8", scale_format=scale_format)
        wanted, wanted_scales = reference.quantize(x, scale_format)
        assert scales is not None and scales.dtype == FORMATS["fp8"].scales_as(scale_format)  # type: ignore[arg-type]
        for got, other in ((rows, wanted), (scales, wanted_scales)):
            bits = torch.uint8 if got.itemsize == 1 else torch.int32
            assert torch.equal(got.view(bits), other.view(bits))


@pytest.mark.parametrize(
    ("name", "most"),  # of the error, over the largest magnitude of the group: half a step of its largest values
    [
        ("fp8", 16 / 448),
        ("fp8_token", 16 / 448),
        ("int8_token", 0.5 / 127),
        ("int8_group", 0.5 / 127),
        ("mxfp8", 16 / 224),
        ("nvfp4", 1 / 5.5),
        ("mxfp4", 1 / 3),
    ],
)
def test_errors_are_half_a_step(name: str, most: float) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    g = 2688.0 / float(x.abs().max()) if name == "nvfp4" else None
    made = dequantize(*quantize(x, name, global_scale=g), name, global_scale=g)
    each = FORMATS[name].group
    group = each if isinstance(each, int) else 256
    amax = x.view(64, -1, group).abs().amax(dim=2).repeat_interleave(group, dim=1)
    assert ((made - x).abs() <= most * 1.01 * amax).all()


def test_dequantize_multiplies_each_value_with_its_scale() -> None:
    rows = torch.tensor([[0x21, 0xF9] + 6 * [0x7]], dtype=torch.uint8)
    scales = torch.tensor([[3.0]]).to(torch.float8_e4m3fn)
    wanted = [1.5, 3.0, -1.5, -18.0] + 6 * [18.0, 0.0]
    assert dequantize(rows, scales, "nvfp4").tolist() == [wanted]
    assert dequantize(rows, scales, "nvfp4", global_scale=2.0, dtype=torch.bfloat16).tolist() == [
        [value / 2 for value in wanted]
    ]
    ends = torch.tensor([[0, 254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ones = torch.ones(1, 64).to(torch.float8_e4m3fn)
    assert dequantize(ones, ends, "mxfp8").tolist() == [32 * [2.0**-127] + 32 * [2.0**127]]


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (131, 7), (257, 224), (0, 8), (3, 130, 5)])
def test_swizzle(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(6)
    *_, rows, columns = shape
    scales = torch.randint(1, 255, shape, generator=g, dtype=torch.uint8)
    wide = -(-columns // 4)
    wanted = torch.zeros(*shape[:-2], -(-rows // 128) * 512 * wide, dtype=torch.uint8)
    for t in range(rows):
        for j in range(columns):
            wanted[..., t // 128 * 512 * wide + j // 4 * 512 + t % 32 * 16 + t % 128 // 32 * 4 + j % 4] = scales[
                ..., t, j
            ]
    assert torch.equal(swizzle(scales), wanted)
    assert torch.equal(unswizzle(wanted, rows, columns), scales)
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        made = swizzle(scales.view(dtype))
        assert made.dtype == dtype and torch.equal(made.view(torch.uint8), wanted)
        assert unswizzle(made, rows, columns).dtype == dtype


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: quantize(x, "fp4"), "quantize"),
        (lambda x: quantize(x, "fp8_token", scale_format="ue8m0"), "scale_format"),
        (lambda x: quantize(x, "fp8", scale_format="e8m0"), "scale_format"),
        (lambda x: quantize(x, "fp8_tensor"), "global_scale"),
        (lambda x: quantize(x, "fp8_tensor", global_scale=0.0), "global_scale"),
        (lambda x: quantize(x, "nvfp4", global_scale=math.inf), "global_scale"),
        (lambda x: quantize(x, "nvfp4", global_scale=torch.ones(2)), "global_scale"),
        (lambda x: quantize(x, "nvfp4", global_scale=torch.ones(1, dtype=torch.float64)), "global_scale"),
        (lambda x: quantize(x, "nvfp4", global_scale=torch.ones(1, device="meta")), "global_scale"),
        (lambda x: quantize(x, "mxfp8", global_scale=1.0), "global_scale"),
        (lambda x: quantize(x, "mxfp8", scale_rule="ceil"), "scale_rule"),
        (lambda x: quantize(x, "mxfp8", scale_rule="range"), "scale_rule"),
        (lambda x: quantize(x, "fp8", scale_rule="floor"), "scale_rule"),
        (lambda x: quantize(x[:, :3], "mxfp4"), "x"),
        (lambda x: quantize(x[0], "mxfp8"), "x"),
        (lambda x: quantize(x[:, :0], "fp8_token"), "x"),
        (lambda x: quantize(x.double(), "fp8_token"), "x"),
        (lambda x: dequantize(x.to(torch.int8), None, "int8_token"), "scales"),
        (lambda x: dequantize(x.to(torch.int8), x, "int8_token"), "scales"),
        (lambda x: dequantize(x.to(torch.int8), x[:, 0], "int8_token"), "scales"),
        (lambda x: dequantize(x[None].to(torch.int8), x[None, :, :1], "int8_token"), "rows"),
        (lambda x: swizzle(x), "scales"),
        (lambda x: swizzle(x.to(torch.uint8)[0]), "scales"),
        (lambda x: unswizzle(x.to(torch.uint8)[0], 2, 5), "scales"),
    ],
)
def test_bad_arguments(call: Callable[[torch.Tensor], object], argument: str) -> None:
    with pytest.raises(BadInput) as error:
        call(torch.ones(2, 64))
    assert error.value.argument == argument
    assert argument != "rows" or "3 dimensions; want two" in str(error.value)


@pytest.mark.parametrize(
    ("name", "rows", "scales"),
    [
        (
            "nvfp4",  # by NVFP4QuantizerRef of TransformerEngine, with 2688 / amax
            "bfe5692ec7f45a8ed6724cafe6613dc7f5691ed7f45b8ee6724cafe6603dc7f5",
            "676e767e",
        ),
        (
            "mxfp8",  # by to_mx of torchao 0.18, which rounds scales up (RCEIL)
            "f5e66cf2d670ef5d73ea68f4e26df1c079f66a7cf172fbe777f95a7af46c7cee"
            "6bf2d970f05b73eb68f4e46df2cc71ee687bf171fbe876f9547af56c7cf073fb",
            "7a7c",
        ),
        ("mxfp4", "9bb1280a93b1298ab4512a9dc4402ba5b1280a93b1298aa2512a9dc4401ba5d3", "8183"),  # likewise
    ],
)
def test_the_same_as_others(name: str, rows: str, scales: str) -> None:
    """Values of which none is 0: that reference drops the sign of zeros, which the instruction keeps."""
    i = torch.arange(64)
    x = ((i * 37 % 101 - 50.5) * 2.0 ** (i // 16) / 8).bfloat16().view(1, 64)
    made = quantize(x, name, global_scale=torch.full((1,), 2688.0) / 48.5 if name == "nvfp4" else None)
    assert [bytes(t.view(torch.uint8).flatten().tolist()).hex() for t in made if t is not None] == [rows, scales]


def test_the_table() -> None:
    """Sizes of rows as consumers know them."""
    columns = {name: (fmt.value_columns(7168), fmt.scale_columns(7168)) for name, fmt in FORMATS.items()}
    assert columns == {
        "fp8": (7168, 56),
        "fp8_token": (7168, 1),
        "fp8_tensor": (7168, 0),
        "int8_token": (7168, 1),
        "int8_group": (7168, 56),
        "mxfp8": (7168, 224),
        "nvfp4": (3584, 448),
        "mxfp4": (3584, 224),
    }
    assert FORMATS["fp8"].scales_as("ue8m0") == torch.float8_e8m0fnu
    assert {fmt.scales_as("fp32") for fmt in FORMATS.values()} == {fmt.scales for fmt in FORMATS.values()}
    assert formats.FORMATS["int8_group"].scales_as("ue8m0") == torch.float32
