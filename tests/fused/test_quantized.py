"""Scales of rows and channels: casts, and the grouped GEMM of FP8 and INT8 on CPUs."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, cast

import pytest
import torch

from moecomm import formats
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import Fp8, Int8, grouped_gemm, interleave, quantize_channels, quantize_rows, quantize_weights
from moecomm.fused.activations import SWIGLU
from moecomm.fused.channels import CHANNELS
from moecomm.fused.formats import format_of
from moecomm.fused.fp4 import Mxfp4, Nvfp4, dequantize
from moecomm.fused.fp8 import BLOCKS
from moecomm.fused.kernels import FP8
from moecomm.fused.weight_format import PLAIN
from moecomm.testing import bounds

EXPERTS, N, K = 3, 48, 272
COUNTS = (5, 0, 17)
KINDS = [FP8, torch.int8]


def inputs(dtype: torch.dtype, rows: int = 30) -> tuple[Any, Any]:
    """Magnitudes of rows and channels differ: another's scale is far off."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, K, generator=g), torch.randn(EXPERTS, N, K, generator=g) / K**0.5
    x *= torch.exp2(torch.randint(-4, 5, (rows, 1), generator=g))
    w *= torch.exp2(torch.randint(-3, 4, (EXPERTS, N, 1), generator=g))
    return quantize_rows(x, dtype), quantize_channels(w, dtype)


def counts_of(counts: tuple[int, ...] = COUNTS) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


def to_float32(value: Fraction) -> float:
    return torch.tensor(float(value), dtype=torch.float64).float().item()


def test_fp8_rows_have_vllm_s_scales() -> None:
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3], x[4] = 0, 2.0**-40
    x[5, 0] = 3e38
    data, scales = quantize_rows(x)
    assert isinstance(quantize_rows(x), Fp8) and data.dtype is FP8 and scales.shape == (20, 1)
    for row, values, scale in zip(x.float(), data.float(), scales[:, 0].tolist(), strict=True):
        amax = row.abs().max().item()
        assert scale == max(to_float32(Fraction(amax) / 448), to_float32(Fraction(1, 448 * 512)))
        want = torch.tensor([to_float32(Fraction(v) / Fraction(scale)) for v in row.tolist()]).clamp(-448, 448).to(FP8)
        assert torch.equal(values, want.float())
    assert not data[3].float().any() and scales[3] == scales[4]


def test_int8_rows_have_vllm_s_scales() -> None:
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    data, scales = quantize_rows(x, torch.int8)
    assert isinstance(quantize_rows(x, torch.int8), Int8) and data.dtype is torch.int8
    for row, values, scale in zip(x, data.tolist(), scales[:, 0].tolist(), strict=True):
        amax = row.abs().max().item()
        assert scale == to_float32(Fraction(amax) / 127)
        up = 0.0 if amax == 0 else to_float32(127 / Fraction(amax))
        assert values == [round(to_float32(Fraction(v) * Fraction(up))) for v in row.tolist()]
        assert amax == 0 or max(map(abs, values)) == 127


@pytest.mark.parametrize("dtype", KINDS)
def test_every_bf16_value_stands_for_itself_within_the_cast_s_error(dtype: torch.dtype) -> None:
    values = torch.arange(1 << 16).to(torch.int32).short().view(torch.bfloat16)
    finite = values.isfinite()
    x = torch.stack((values, torch.full_like(values, 1.5)), dim=1)
    data, scales = quantize_rows(x, dtype)
    wide, exact = data.double() * scales.double(), x.double()
    step = scales.double() * (0.5 if dtype is torch.int8 else 2.0**-10)
    off = step if dtype is torch.int8 else torch.maximum(step, exact.abs() * 2.0**-4)
    assert bool(((wide - exact).abs() <= off * (1 + 2.0**-20))[finite].all())
    assert not bool(wide[~finite, 0].isfinite().any()), "infinities and NaNs do not become numbers"


@pytest.mark.parametrize("dtype", KINDS)
def test_channels_are_cast_as_rows_are(dtype: torch.dtype) -> None:
    w = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    (data, scales), rows = quantize_channels(w, dtype), quantize_rows(w, dtype)
    assert torch.equal(data.view(torch.uint8), rows.data.view(torch.uint8)) and torch.equal(scales, rows.scales[..., 0])
    assert format_of(quantize_channels(w, dtype)) is CHANNELS
    assert format_of(quantize_weights(w)) is BLOCKS and format_of(w) is PLAIN


@pytest.mark.parametrize(
    ("x", "dtype", "argument"),
    [
        (None, FP8, "x"),
        (torch.zeros(3, 4).double(), FP8, "x"),
        (torch.zeros(3, 0), FP8, "x"),
        (torch.zeros(3, 4), torch.float8_e5m2, "dtype"),
    ],
)
def test_what_cannot_be_cast_is_named(x: Any, dtype: torch.dtype, argument: str) -> None:
    with pytest.raises(BadInput) as caught:
        quantize_rows(x, dtype)
    assert caught.value.argument == argument
    with pytest.raises(BadInput, match="w"):
        quantize_channels(torch.zeros(4))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("activation", "interleaved"), [(None, True), ("swiglu", True), ("swiglu", False)])
def test_values_are_those_of_float64(dtype: torch.dtype, activation: Any, interleaved: bool) -> None:
    x, w = inputs(dtype)
    bias = torch.randn(EXPERTS, N, generator=torch.Generator().manual_seed(1))
    matrix = w.data.double() * w.scales.double().unsqueeze(2)
    if activation and interleaved:
        raw = interleave(w.data.view(torch.uint8)).view(dtype)
        w = type(w)(raw, interleave(w.scales.unsqueeze(2)).squeeze(2))
    how: dict[str, Any] = {"alignment": 8, "activation": activation, "interleaved": interleaved, "bias": bias}
    out = torch.full((30, N // 2 if activation else N), 7.0, dtype=torch.float16)
    assert grouped_gemm(x, w, counts_of(), **how, out=out) is out
    rows, untouched = x.data.double() * x.scales.double(), torch.ones(30, dtype=torch.bool)
    for group, place in enumerate((slice(0, 5), slice(8, 8), slice(8, 25))):
        exact = torch.zeros_like(rows[place])
        both = bounds.product(rows[place], exact, matrix[group], bounds.lost_by_sums(K, torch.device("cpu")))
        want, off = bounds.biased(*both, bias[group])
        if activation:
            want, off = bounds.gated(want, off, SWIGLU)
        off = bounds.rounded(want, off, torch.float16)
        assert bool(((out[place].double() - want).abs() <= off).all())
        untouched[place] = False
    assert bool((out[untouched] == 7).all())


def test_sums_of_int8_are_exact() -> None:
    g = torch.Generator().manual_seed(2)
    x, w = (torch.randint(100, 128, shape, generator=g).to(torch.int8) for shape in ((9, 4096), (1, 16, 4096)))
    scales = torch.rand(9, 1, generator=g), torch.rand(1, 16, generator=g)
    out = grouped_gemm(Int8(x, scales[0]), Int8(w, scales[1]), counts_of((9,)))
    sums = (x.long() @ w[0].long().T).float()
    assert float(sums.abs().max()) > 2**24
    assert torch.equal(out, (sums * (scales[0] * scales[1])).bfloat16())


def test_weights_of_compressed_tensors_are_taken_as_they_come() -> None:
    """Its INT8 divides by 127.5, uses -128, and has scales `[N, 1]` in bfloat16."""
    g = torch.Generator().manual_seed(4)
    w = torch.randn(EXPERTS, N, K, generator=g)
    values, scales = formats.quantize(w.view(-1, K), "int8_token", scale_rule="range")
    assert scales is not None
    values, scales = values.view(w.shape), scales.bfloat16().view(EXPERTS, N, 1)
    assert (values == -128).any() and (values == 127).any()
    x = quantize_rows(torch.randn(30, K, generator=g), torch.int8)
    out = grouped_gemm(x, Int8(values, scales.float().squeeze(-1)), counts_of((10, 10, 10)))
    for expert, place in enumerate((slice(0, 10), slice(10, 20), slice(20, 30))):
        sums = (x.data[place].long() @ values[expert].long().T).float()
        want = (sums * (x.scales[place] * scales[expert].float().T)).bfloat16()
        assert torch.equal(out[place], want)


@pytest.mark.parametrize("dtype", KINDS)
def test_scales_of_whole_tensors_are_those_of_every_row_and_channel(dtype: torch.dtype) -> None:
    x, w = inputs(dtype)
    of_x, of_w = torch.tensor([0.5]), torch.tensor([0.25, 2.0, 3.0])
    kind = type(x)
    want = grouped_gemm(kind(x.data, of_x.expand(30, 1)), kind(w.data, of_w[:, None].expand(EXPERTS, N)), counts_of())
    for one, other in itertools.product((of_x, of_x[0]), (of_w, of_w[:, None])):
        assert torch.equal(grouped_gemm(kind(x.data, one), kind(w.data, other), counts_of())[:22], want[:22])


def test_batched_rows_are_those_of_each_expert() -> None:
    x, w = inputs(FP8, rows=EXPERTS * 8)
    counts = (8, 0, 3)
    out = grouped_gemm(Fp8(x.data.view(EXPERTS, 8, K), x.scales.view(EXPERTS, 8, 1)), w, counts_of(counts))
    for expert, count in enumerate(counts):
        rows = slice(8 * expert, 8 * expert + 8)
        one = Fp8(x.data[rows], x.scales[rows]), Fp8(w.data[expert : expert + 1], w.scales[expert : expert + 1])
        assert torch.equal(out[expert, :count], grouped_gemm(*one, counts_of((8,)))[:count])


X, W = inputs(FP8)
I8, W8 = inputs(torch.int8)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": (X.data, X.scales[:5])}, BadInput, "x"),
    ({"x": (X.data, X.scales.double())}, BadInput, "float32"),
    ({"w": (W.data, W.scales[:, :5])}, BadInput, "w"),
    ({"w": (W.data, W.scales.half())}, BadInput, "float32"),
    ({"w": (W.data, torch.ones(EXPERTS, 1, 3))}, BadInput, "x"),
    ({"w": W8}, BadInput, "w"),
    ({"x": I8}, BadInput, "w"),
    ({"x": I8.data, "w": W8.data}, Unsupported, "int8"),
    ({"x": (X.data.float().half(), X.scales), "w": (W.data.float().half(), W.scales)}, BadInput, "x"),
    ({"quantize": "fp8", "activation": "swiglu"}, Unsupported, "scales of blocks"),
    ({"out_dtype": torch.float32}, Unsupported, "float32"),
]


@pytest.mark.parametrize(("change", "error", "why"), BAD)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], why: str) -> None:
    given: dict[str, Any] = {"x": X, "w": W, "counts": counts_of()} | change
    with pytest.raises(error, match=why):
        grouped_gemm(given.pop("x"), given.pop("w"), given.pop("counts"), **given)
    assert math.isfinite(float(grouped_gemm(X, W, counts_of())[0, 0]))


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_every_mxfp4_value_is_exact_in_bfloat16() -> None:
    """All 16 values with all 256 exponents, at even and odd columns."""
    data = torch.arange(16, dtype=torch.uint8) | (15 - torch.arange(16, dtype=torch.uint8)) << 4  # low, high
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    found = dequantize(Mxfp4(data.expand(1, 256, 16).contiguous(), scales))
    assert found.dtype is torch.bfloat16 and found.shape == (1, 256, 32)
    signed = [sign * value for sign in (1, -1) for value in E2M1]
    for scale, row in enumerate(found[0].double().tolist()):
        for column, got in enumerate(row):
            code = column // 2 if column % 2 == 0 else 15 - column // 2
            want = signed[code] * 2.0 ** (scale - 127)
            if scale == 255:
                assert math.isnan(got)
            elif abs(want) >= 2.0**128:
                assert got == math.copysign(math.inf, want)
            else:
                assert got == want and math.copysign(1, got) == (1 if code < 8 else -1)


def test_groups_of_32_columns_have_their_own_exponent() -> None:
    g = torch.Generator().manual_seed(0)
    w = Mxfp4(
        *(torch.randint(0, n, shape, generator=g).to(torch.uint8) for n, shape in ((256, (3, 5, 48)), (200, (3, 5, 3))))
    )
    found = dequantize(w)
    for expert, row, column in itertools.product(range(3), range(5), range(96)):
        byte = int(w.data[expert, row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        value = (-1 if code >= 8 else 1) * E2M1[code % 8] * 2.0 ** (int(w.scales[expert, row, column // 32]) - 127)
        assert float(found[expert, row, column]) == value


def test_a_grouped_gemm_widens_mxfp4() -> None:
    g = torch.Generator().manual_seed(0)
    data, scales = torch.randint(0, 256, (2, 16, 32), generator=g), torch.randint(120, 130, (2, 16, 2), generator=g)
    w, x = Mxfp4(data.to(torch.uint8), scales.to(torch.uint8)), torch.randn(9, 64, generator=g).bfloat16()
    assert torch.equal(grouped_gemm(x, w, counts_of((4, 5))), grouped_gemm(x, dequantize(w), counts_of((4, 5))))
    for wrong in (Mxfp4(w.data, w.scales[:, :, :1]), Mxfp4(w.data.int(), w.scales), Mxfp4(w.data[0], w.scales[0])):
        with pytest.raises(BadInput, match="w"):
            grouped_gemm(x, wrong, counts_of((4, 5)))


def test_exponents_may_be_bytes_or_e8m0() -> None:
    data, scales = formats.quantize(torch.randn(32, 64), "mxfp4")
    assert scales is not None
    pair = data.view(2, 16, 32), scales.view(2, 16, 2)
    w, x = Mxfp4(*pair), torch.randn(9, 64).bfloat16()
    want = grouped_gemm(x, w, counts_of((4, 5)))
    of_bytes = w.data, w.scales.view(torch.uint8)
    others: list[Any] = [Mxfp4(*of_bytes), pair, Fp8(*pair), of_bytes]  # as layers take them
    for same in others:
        assert torch.equal(grouped_gemm(x, same, counts_of((4, 5))), want)


def in_nvfp4(seed: int, experts: int, rows: int, columns: int, factors: tuple[int, ...]) -> tuple[Nvfp4, torch.Tensor]:
    """Weights, and what they stand for in float64."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (experts, rows, columns // 2), generator=g)
    codes = torch.randint(0, 126, (experts, rows, columns // 16), generator=g).to(torch.uint8)  # no NaN
    scales, factor = codes.view(torch.float8_e4m3fn), 0.001 + torch.rand(factors, generator=g)
    values = torch.tensor([sign * value for sign in (1, -1) for value in E2M1], dtype=torch.float64)
    exact = values[torch.stack((data & 15, data >> 4), 3).flatten(2)]
    exact = exact * scales.double().repeat_interleave(16, 2) * factor.double().view(experts, -1, 1)
    return Nvfp4(data.to(torch.uint8), scales, factor), exact


@pytest.mark.parametrize("factors", [(3,), (3, 1), (3, 40)])
def test_nvfp4_values_are_within_their_bound_of_the_exact_ones(factors: tuple[int, ...]) -> None:
    w, exact = in_nvfp4(0, 3, 40, 96, factors)
    assert bool(((dequantize(w).double() - exact).abs() <= 2**-8 * exact.abs()).all())


def test_a_grouped_gemm_of_nvfp4_is_within_its_bound() -> None:
    w, exact = in_nvfp4(1, 2, 16, 64, (2,))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = grouped_gemm(x, w, counts_of((4, 5)))
    assert torch.equal(found, grouped_gemm(x, dequantize(w), counts_of((4, 5))))
    assert torch.equal(found, grouped_gemm(x, cast(Any, tuple(w)), counts_of((4, 5))))
    for expert, rows in enumerate((slice(4), slice(4, 9))):
        want = x[rows].double() @ exact[expert].T
        sizes = x[rows].double().abs() @ exact[expert].abs().T
        bound = (2**-8 + 66 * 2**-23) * sizes  # of the weights, and of sums in float32
        bound += 2**-8 * (want.abs() + bound)  # of the result
        assert bool(((found[rows].double() - want).abs() <= bound).all())
    wrong: list[Any] = [w._replace(scales=w.scales.view(torch.uint8)), w._replace(scales=w.scales[:, :, :2])]
    wrong += [w._replace(factors=w.factors.double()), w._replace(factors=w.factors[:1]), w._replace(data=w.data[0])]
    for one in wrong:
        with pytest.raises(BadInput, match="w"):
            grouped_gemm(x, one, counts_of((4, 5)))
    with pytest.raises(BadInput, match="w"):
        grouped_gemm(x.half(), w, counts_of((4, 5)))
