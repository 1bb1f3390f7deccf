"""The grouped GEMM on CPUs, the transform of its weights, and what it does not take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput, Unsupported
from moecomm.fused import FP8_SCHEDULES, SCHEDULES, deinterleave, gemm, grouped_gemm, interleave, tensor_maps
from moecomm.fused.gemm import split_map
from moecomm.fused.operands import Operands
from moecomm.fused.tensor_maps import parameters
from moecomm.gpu.structs import struct

EXPERTS, N, K = 3, 32, 24


def inputs(dtype: torch.dtype = torch.bfloat16, rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, K, generator=generator), torch.randn(EXPERTS, N, K, generator=generator) / K**0.5
    return x.to(dtype), w.to(dtype)


def by_hand(x: torch.Tensor, w: torch.Tensor, row: int, expert: int, column: int) -> float:
    return math.fsum(a * b for a, b in zip(x[row].tolist(), w[expert, column].tolist(), strict=True))


def owners(counts: list[int], alignment: int) -> dict[int, int]:
    """The expert of each row that has one."""
    found, begin = {}, 0
    for expert, count in enumerate(counts):
        found |= dict.fromkeys(range(begin, begin + count), expert)
        begin = -(-(begin + count) // alignment) * alignment
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_values_are_those_of_plain_loops(dtype: torch.dtype, activation: str | None) -> None:
    x, w = inputs(dtype)
    counts, alignment = [5, 0, 17], 8
    columns = N if activation is None else N // 2
    out = torch.full((len(x), columns), 7.0, dtype=dtype)
    given = w if activation is None else interleave(w)
    same = grouped_gemm(
        x, given, torch.tensor(counts, dtype=torch.int32), alignment=alignment, activation=activation, out=out
    )
    assert same is out
    expert_of, rounding = owners(counts, alignment), torch.finfo(dtype).eps
    for row in range(len(x)):
        for column in range(columns):
            got, want = out[row, column].item(), 7.0
            if row in expert_of:
                want = by_hand(x, w, row, expert_of[row], column)
                if activation is not None:
                    want = want / (1 + math.exp(-want)) * by_hand(x, w, row, expert_of[row], N // 2 + column)
            assert abs(got - want) <= rounding * abs(want) + 1e-5, (row, column)


def test_gate_and_up_rows_apart_give_the_same_bits() -> None:
    x, w = inputs()
    counts = torch.tensor([5, 0, 17], dtype=torch.int32)
    woven = grouped_gemm(x, interleave(w), counts, activation="swiglu")
    assert torch.equal(grouped_gemm(x, w, counts, activation="swiglu", interleaved=False)[:22], woven[:22])


def test_the_map_of_rows_apart_finds_what_interleave_puts_there() -> None:
    """Elements of each box, by the strides that the copy engine is told."""
    groups, columns, depth = 2, 304, 72  # more than two boxes of 128 rows, and of 64 columns
    w13 = torch.arange(groups * columns * depth).view(groups, columns, depth)
    shape, strides, box = split_map((groups, columns, depth), torch.bfloat16)
    _, rank, _, dims, steps, boxes, _ = parameters(0, shape, torch.bfloat16, box, strides)
    assert rank == 5 and all(step % 16 == 0 for step in steps) and boxes == [64, 8, 2, 8, 1]
    seen = w13.flatten().as_strided(shape, strides)
    assert list(reversed(seen.shape)) == dims and [2 * s for s in reversed(seen.stride()[:-1])] == steps
    assert torch.equal(seen.reshape(groups, columns, depth), interleave(w13))


def test_what_a_launch_is_told_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same addresses, shapes and schedule; and anew for others."""
    asked: list[Any] = []

    def encode(*about: Any) -> Any:
        asked.append(about)
        return struct("TensorMap")()

    monkeypatch.setattr(tensor_maps, "encode", encode)
    x, w = inputs(rows=EXPERTS * 8)
    given, some = Operands(x, w, torch.zeros(EXPERTS, dtype=torch.int32)), SCHEDULES["128x6c1"]
    told = gemm.arguments(given, False, 64, None, some)
    maps = 1 + 4  # of weights; of 16, 32, 64 and 128 rows
    assert len(asked) == maps and gemm.arguments(given, False, 64, None, some) is told and len(asked) == maps
    assert (told.out, told.grouping.rows, told.grouping.group_rows, told.grouping.alignment) == (64, EXPERTS * 8, 0, 1)
    batched = gemm.arguments(given._replace(x=x.view(EXPERTS, 8, K)), False, 64, None, some)
    assert (batched.grouping.rows, batched.grouping.group_rows) == (EXPERTS * 8, 8)
    assert gemm.arguments(given, False, 128, None, some).out == 128
    assert gemm.arguments(given, False, 64, None, some, 16).grouping.alignment == 16
    assert gemm.arguments(given, False, 64, None, SCHEDULES["64x8c1"]).grouping.most_rows == 64
    counts = given.counts.clone()
    assert gemm.arguments(given._replace(counts=counts), False, 64, None, some).counts == counts.data_ptr()
    fewer = gemm.arguments(given._replace(x=x[:, : K // 2]), False, 64, None, some)  # rows that lie apart
    assert fewer is not told and asked[-1][4] == (K, 1)


def test_scales_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", lambda *about: struct("TensorMap")())
    x, w = (t.to(torch.float8_e4m3fn) for t in inputs())
    scales, others, made = torch.ones(40, 3), torch.ones(EXPERTS, 1, 1), torch.ones(40, 1)
    given = Operands(x, w, torch.zeros(EXPERTS, dtype=torch.int32), scales, others)
    told = gemm.arguments(given, False, 64, made, FP8_SCHEDULES["64x5c1"])
    assert (told.x_scales, told.w_scales, told.out_scales) == (scales.data_ptr(), others.data_ptr(), made.data_ptr())
    assert (told.x_scale_row, told.x_scale_column) == (3, 1)
    by_column = given._replace(x_scales=torch.ones(3, 40).t())
    told = gemm.arguments(by_column, False, 64, None, FP8_SCHEDULES["64x5c1"])
    assert (told.x_scale_row, told.x_scale_column, told.out_scales) == (1, 40, 0)


def test_batched_rows_are_those_of_each_expert() -> None:
    x, w = inputs(rows=EXPERTS * 8)
    counts = torch.tensor([8, 0, 3], dtype=torch.int32)
    out = torch.full((EXPERTS, 8, N), 7.0, dtype=x.dtype)
    grouped_gemm(x.view(EXPERTS, 8, K), w, counts, out=out)
    for expert, count in enumerate(counts.tolist()):
        begin = expert * 8
        alone = grouped_gemm(x[begin : begin + 8], w[expert : expert + 1], counts.new_tensor([8]))
        assert torch.equal(out[expert, :count], alone[:count]) and bool((out[expert, count:] == 7).all())


def test_parameters_are_weights_and_get_no_gradients() -> None:
    x, w = inputs()
    counts, out = torch.tensor([5, 0, 17], dtype=torch.int32), torch.zeros(len(x), N, dtype=x.dtype)
    same = grouped_gemm(x, torch.nn.Parameter(w), counts, out=out)
    assert not same.requires_grad and torch.equal(same[:22], grouped_gemm(x, w, counts)[:22])


def test_no_rows() -> None:
    x, w = inputs(rows=0)
    assert grouped_gemm(x, w, torch.zeros(EXPERTS, dtype=torch.int32)).shape == (0, N)


def test_gate_and_up_rows_are_interleaved_by_eight_and_come_back() -> None:
    w13 = torch.arange(2 * 64 * 5).view(2, 64, 5)
    woven = interleave(w13)
    for block in range(4):
        assert torch.equal(woven[:, 16 * block : 16 * block + 8], w13[:, 8 * block : 8 * block + 8])
        assert torch.equal(woven[:, 16 * block + 8 : 16 * block + 16], w13[:, 32 + 8 * block : 40 + 8 * block])
    assert woven.is_contiguous() and torch.equal(deinterleave(woven), w13)
    for weave in (interleave, deinterleave):
        with pytest.raises(BadInput, match="w13"):
            weave(torch.zeros(24, 5))
        with pytest.raises(BadInput, match="w13"):
            weave(None)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"activation": "gelu"}, BadInput, "activation"),
        ({"alignment": 0}, BadInput, "alignment"),
        ({"alignment": 1.5}, BadInput, "alignment"),
        ({"alignment": "8"}, BadInput, "alignment"),
        ({"counts": [1, 2, 3]}, BadInput, "tokens_per_expert"),
        ({"x": torch.zeros(4, K).bfloat16().T}, BadInput, "x"),
        ({"w": torch.zeros(EXPERTS, N, K)}, BadInput, "w"),
        ({"w": torch.zeros(EXPERTS, N, K + 8).bfloat16()}, BadInput, "K"),
        ({"counts": torch.zeros(EXPERTS, dtype=torch.int64)}, BadInput, "tokens_per_expert"),
        ({"counts": torch.zeros(EXPERTS + 1, dtype=torch.int32)}, BadInput, "tokens_per_expert"),
        ({"counts": torch.zeros(2 * EXPERTS, dtype=torch.int32)[::2]}, BadInput, "tokens_per_expert"),
        ({"out": torch.zeros(40, N)}, BadInput, "out"),
        ({"schedule": "64x8c1"}, BadInput, "schedule: got '64x8c1'; want one of SCHEDULES"),
        ({"schedule": FP8_SCHEDULES["128x4c1r"]}, BadInput, "one of SCHEDULES"),
        ({"x": torch.zeros(40, K), "w": torch.zeros(EXPERTS, N, K)}, Unsupported, "float32"),
        ({"w": torch.zeros(EXPERTS, 12, K).bfloat16()}, Unsupported, "multiple of 8"),
        ({"w": torch.zeros(EXPERTS, 24, K).bfloat16(), "activation": "swiglu"}, Unsupported, "multiple of 16"),
        ({"w": torch.zeros(513, 8, K).bfloat16(), "counts": torch.zeros(513, dtype=torch.int32)}, Unsupported, "512"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], why: str) -> None:
    x, w = inputs()
    given: dict[str, Any] = {"x": x, "w": w, "counts": torch.zeros(EXPERTS, dtype=torch.int32)} | change
    with pytest.raises(error, match=why):
        grouped_gemm(given.pop("x"), given.pop("w"), given.pop("counts"), **given)
