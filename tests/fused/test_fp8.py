"""FP8: the cast of weights, the grouped GEMM of e4m3 with scales on CPUs, and what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.dispatch.reference import by_column, quantize
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import (
    FP8_SCHEDULES,
    SCHEDULES,
    Fp8,
    Schedule,
    choose_fp8,
    grouped_gemm,
    interleave,
    quantize_weights,
)
from moecomm.fused.gemm import split_map
from moecomm.fused.schedules import check_schedule
from moecomm.fused.tensor_maps import parameters
from moecomm.testing import bounds
from moecomm.testing.bounds import expected_gemm, in_float64

EXPERTS, N, K = 3, 320, 272  # blocks of 128 and parts of one
COUNTS = (5, 0, 17)


def inputs(rows: int = 40) -> tuple[Fp8, Fp8]:
    """Rows and blocks of very different magnitudes: another's scale is far off."""
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, K, generator=generator), torch.randn(EXPERTS, N, K, generator=generator)
    sizes = torch.randperm(EXPERTS * 3 * 3, generator=generator).view(EXPERTS, 3, 3) % 5 - 2.0
    x *= torch.exp2(torch.randint(-2, 3, (rows, 1), generator=generator))
    w *= torch.exp2(sizes).repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)[:, :N, :K] / K**0.5
    return Fp8(*quantize(x)), quantize_weights(w)


def counts_of(counts: tuple[int, ...] = COUNTS) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_weights_have_a_scale_for_each_block_of_128_by_128() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 200, 300, generator=generator).bfloat16()
    w[0, :128, 128:256] = 0
    w[1, 130, 299] = 5000.0
    data, scales = quantize_weights(w)
    assert data.shape == w.shape and data.dtype == torch.float8_e4m3fn and scales.shape == (2, 2, 3)
    for group in range(2):
        for i in range(2):
            for j in range(3):
                at = group, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                block, cast, scale = w[at].double(), data[at].double(), scales[group, i, j]
                assert scale == block.abs().max().clamp(min=1e-4).float() / 448.0
                off = 2.0**-4 * block.abs() + float(scale) * 2.0**-10
                assert bool(((cast * float(scale) - block).abs() <= off).all())
                assert not block.any() or cast.abs().max() == 448.0


def test_parameters_are_cast_without_gradients() -> None:
    w = torch.randn(2, 130, 140, generator=torch.Generator().manual_seed(1))
    for got, want in zip(quantize_weights(torch.nn.Parameter(w)), quantize_weights(w), strict=True):
        assert not got.requires_grad and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("w", [None, torch.zeros(8), torch.zeros(8, 8, dtype=torch.int64)])
def test_what_is_no_weights_is_named(w: Any) -> None:
    with pytest.raises(BadInput, match="w"):
        quantize_weights(w)


def test_the_cast_of_weights_is_that_of_a_dispatch() -> None:
    """Where every row of a block has its largest magnitude, a row's scale is its block's."""
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    w[:, ::128] = torch.tensor([[4.7], [6.1]]).repeat_interleave(128, dim=0)
    (rows, row_scales), (blocks, block_scales) = quantize(w), quantize_weights(w)
    assert same_bits(rows, blocks) and torch.equal(row_scales, block_scales.repeat_interleave(128, dim=0))


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_float64(activation: str | None, interleaved: bool, dtype: torch.dtype) -> None:
    x, w = inputs()
    how: dict[str, Any] = {"alignment": 8, "activation": activation, "interleaved": interleaved}
    columns = N if activation is None else N // 2
    out = torch.full((40, columns), 7.0, dtype=dtype)
    assert grouped_gemm(x, w, counts_of(), **how, out=out) is out
    by_rank = grouped_gemm(Fp8(x.data, by_column(x.scales)), w, counts_of(), **how, out_dtype=dtype)
    untouched = torch.ones(40, dtype=torch.bool)
    for group, want, off in expected_gemm(x, w, COUNTS, **how, dtype=dtype, device=torch.device("cpu")):
        assert bool(((out[group].double() - want).abs() <= off).all())
        assert same_bits(out[group], by_rank[group])
        untouched[group] = False
    assert bool((out[untouched] == 7).all()) and int(untouched.sum()) == 40 - sum(COUNTS)


@pytest.mark.parametrize("taken", ["x", "w", "rows of w"])
def test_the_bound_sees_a_scale_of_another(taken: str) -> None:
    x, w = inputs()
    wrong = {
        "x": (Fp8(x.data, x.scales.roll(1, dims=0)), w),
        "w": (x, Fp8(w.data, w.scales.roll(1, dims=2))),
        "rows of w": (x, Fp8(w.data, w.scales.roll(1, dims=1))),
    }[taken]
    out = grouped_gemm(*wrong, counts_of())
    how: dict[str, Any] = {"alignment": 1, "activation": None, "interleaved": True}
    for group, want, off in expected_gemm(x, w, COUNTS, **how, dtype=out.dtype, device=torch.device("cuda")):
        rows = int(((out[group].double() - want).abs() > off).any(dim=1).sum())
        assert rows >= 0.7 * len(want), "and the bound of sums on tensor cores does so, too"


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_product_is_cast_as_a_dispatch_casts_it(interleaved: bool) -> None:
    x, w = inputs()
    how: dict[str, Any] = {"activation": "swiglu", "interleaved": interleaved}
    plain, cast = grouped_gemm(x, w, counts_of(), **how), grouped_gemm(x, w, counts_of(), **how, quantize="fp8")
    assert cast.data.shape == (40, N // 2) and cast.scales.shape == (40, 2)
    data, scales = quantize(plain[: sum(COUNTS)])
    assert same_bits(cast.data[: sum(COUNTS)], data) and torch.equal(cast.scales[: sum(COUNTS)], scales)
    given = Fp8(torch.empty_like(cast.data), torch.empty_like(cast.scales))
    again = grouped_gemm(x, w, counts_of(), **how, quantize="fp8", out=given)
    assert again.data is given.data and same_bits(given.data[: sum(COUNTS)], data)


def test_gate_and_up_rows_apart_give_the_same_bits() -> None:
    """Where scales of blocks are all alike: they are of w as it lies."""
    x, w = inputs()
    even = w.scales[:, :1, :1].expand_as(w.scales).contiguous()
    apart = grouped_gemm(x, Fp8(w.data, even), counts_of(), activation="swiglu", interleaved=False)
    woven = Fp8(interleave(w.data.view(torch.uint8)).view(torch.float8_e4m3fn), even)
    assert torch.equal(grouped_gemm(x, woven, counts_of(), activation="swiglu")[:22], apart[:22])


def test_batched_rows_are_those_of_each_expert() -> None:
    generator = torch.Generator().manual_seed(3)

    def exact(*shape: int, blocks: tuple[int, ...]) -> Fp8:
        """Integers, and powers of two as scales: no sum is rounded, so bits do not depend on the number of rows."""
        values = torch.randint(-4, 5, shape, generator=generator).to(torch.float8_e4m3fn)
        return Fp8(values, torch.exp2(torch.randint(-2, 3, blocks, generator=generator).float()))

    like_x, like_w = inputs(rows=EXPERTS * 8)
    x, w = (exact(*like.data.shape, blocks=tuple(like.scales.shape)) for like in (like_x, like_w))
    counts = (8, 0, 3)
    batched = Fp8(x.data.view(EXPERTS, 8, K), x.scales.view(EXPERTS, 8, -1))
    out = grouped_gemm(batched, w, counts_of(counts))
    for expert, count in enumerate(counts):
        rows = slice(8 * expert, 8 * expert + 8)
        one = Fp8(x.data[rows], x.scales[rows]), Fp8(w.data[expert : expert + 1], w.scales[expert : expert + 1])
        assert torch.equal(out[expert, :count], grouped_gemm(*one, counts_of((8,)))[:count])


def test_the_map_of_rows_apart_finds_what_interleave_puts_there() -> None:
    groups, columns, depth = 2, 576, 272  # more than two boxes of 256 rows, and of 128 columns
    w13 = torch.arange(groups * columns * depth).view(groups, columns, depth)
    shape, strides, box = split_map((groups, columns, depth), torch.float8_e4m3fn)
    kind, rank, _, dims, steps, boxes, _ = parameters(0, shape, torch.float8_e4m3fn, box, strides)
    assert kind.endswith("UINT8") and rank == 5 and all(step % 16 == 0 for step in steps)
    assert boxes == [128, 8, 2, 16, 1]
    seen = w13.flatten().as_strided(shape, strides)
    assert list(reversed(seen.shape)) == dims and list(reversed(seen.stride()[:-1])) == steps
    assert torch.equal(seen.reshape(groups, columns, depth), interleave(w13))


def test_the_bound_of_a_cast_is_what_the_cast_loses() -> None:
    values = torch.randn(64, 300, generator=torch.Generator().manual_seed(2)).double() * 3
    wide = in_float64(Fp8(*quantize(values.float())), 1)
    off = bounds.cast(values, torch.zeros_like(values))
    assert bool(((wide - values).abs() <= off).all())
    assert float((off / (wide - values).abs().clamp(min=1e-9)).min()) < 1.2, "and hardly more"


def test_any_shape_gets_a_schedule_that_there_is() -> None:
    chosen = {
        choose_fp8(rows, groups, columns, depth)
        for rows in (0, 1, 40, 41, 192, 1 << 20)
        for groups in (1, 64)
        for columns in (8, 1024, 2880, 7168)
        for depth in (16, 2048)
    }
    assert chosen == set(FP8_SCHEDULES)  # and none is there for nothing


X, W = inputs()
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": X.data}, BadInput, "x"),
    ({"w": W.data}, BadInput, "w"),
    ({"schedule": SCHEDULES["64x8c1"]}, BadInput, "one of FP8_SCHEDULES"),
    ({"x": (X.data.float().bfloat16(), X.scales), "w": (W.data.float().bfloat16(), W.scales)}, BadInput, "x"),
    ({"x": (*X, *X)}, BadInput, "pair"),
    ({"x": (X.data, X.scales[:, :2])}, BadInput, "scales"),
    ({"x": (X.data, X.scales.double())}, BadInput, "float32"),
    ({"w": (W.data, W.scales[:, :2].contiguous())}, BadInput, "scales"),
    ({"w": (W.data, W.scales.transpose(1, 2).contiguous().transpose(1, 2))}, BadInput, "gaps"),
    ({"w": (W.data.float().bfloat16(), W.scales)}, BadInput, "w"),
    ({"quantize": "int8", "activation": "swiglu"}, BadInput, "quantize"),
    ({"quantize": "fp8"}, Unsupported, "an activation"),
    ({"quantize": "fp8", "activation": "swiglu", "out_dtype": torch.float16}, Unsupported, "out_dtype"),
    ({"out_dtype": torch.float32}, Unsupported, "float32"),
    ({"out": (torch.empty(40, N, dtype=torch.bfloat16), torch.empty(40, 3))}, BadInput, "out"),
    ({"out": torch.empty(40, N + 8, dtype=torch.bfloat16)}, BadInput, "out"),
    ({"x": (X.data.view(80, K // 2), X.scales.view(120, 1)[:80])}, BadInput, "K"),
]


@pytest.mark.parametrize(("change", "error", "why"), BAD)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], why: str) -> None:
    given: dict[str, Any] = {"x": X, "w": W, "counts": torch.zeros(EXPERTS, dtype=torch.int32)} | change
    with pytest.raises(error, match=why):
        grouped_gemm(given.pop("x"), given.pop("w"), given.pop("counts"), **given)


@pytest.mark.parametrize(("columns", "depth", "how"), [(12, 32, {}), (16, 24, {}), (80, 32, {"interleaved": False})])
def test_sizes_that_the_copy_engine_does_not_take(columns: int, depth: int, how: dict[str, Any]) -> None:
    x, w = Fp8(*quantize(torch.zeros(4, depth))), quantize_weights(torch.zeros(1, columns, depth))
    with pytest.raises(Unsupported, match="multiple of"):
        grouped_gemm(x, w, counts_of((4,)), **how, activation="swiglu" if how else None)


def test_schedules_of_other_types_are_not_taken() -> None:
    assert all(isinstance(schedule, Schedule) and schedule.most_rows <= 128 for schedule in FP8_SCHEDULES.values())
    for dtype, name, schedule in (
        (torch.float8_e4m3fn, "FP8_SCHEDULES", SCHEDULES["256x4c1"]),
        (torch.bfloat16, "SCHEDULES", FP8_SCHEDULES["128x4c1r"]),
    ):
        with pytest.raises(BadInput, match=f"one of {name}"):
            check_schedule(dtype, schedule)
