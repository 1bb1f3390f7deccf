"""The grouped GEMM of FP8 on CPUs: the kernel itself, its tensor copies and products by plain functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moecomm.dispatch.reference import by_column, quantize
from moecomm.fused import (
    FP8_SCHEDULES,
    SCHEDULES,
    Fp8,
    gemm,
    grouped_gemm,
    quantize_channels,
    quantize_rows,
    quantize_weights,
    tensor_maps,
)
from moecomm.fused.activations import SWIGLU
from moecomm.fused.formats import format_of
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel
from moecomm.fused.operands import check_operands
from moecomm.testing.bounds import expected_gemm
from moecomm.testing.layers import activations

from ..few import few
from .gemm_machine import encode, run

CPU = torch.device("cpu")


def inputs(counts: tuple[int, ...], slack: int, columns: int, depth: int) -> tuple[Fp8, Fp8]:
    """Magnitudes differ from row to row, and from block to block."""
    g = torch.Generator().manual_seed(columns)
    rows, experts = sum(counts) + slack, len(counts)
    x, w = torch.randn(rows, depth, generator=g), torch.randn(experts, columns, depth, generator=g) / depth**0.5
    down, across = -(-columns // 128), -(-depth // 128)
    sizes = torch.exp2(torch.randperm(experts * down * across, generator=g).view(experts, down, across) % 5 - 2.0)
    w *= sizes.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)[:, :columns, :depth]
    return Fp8(*quantize(x * torch.exp2(torch.randint(-2, 3, (rows, 1), generator=g)))), quantize_weights(w)


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int, int]] = {
    "plain": ("128x4c1", {}, (5, 0, 150), 328, 272),
    "a pair, by column": ("64x5c2", {"by_column": True}, (70, 1), 520, 400),
    "gate and up apart": ("64x5c1", {"activation": "swiglu", "interleaved": False}, (20, 0, 66), 320, 144),
    "interleaved": ("64x5c2", {"activation": "swiglu"}, (3, 40), 560, 144),
    "rows first": ("128x4c1r", {}, (5, 0, 150), 328, 272),
    "rows first, apart": ("128x4c1r", {"activation": "swiglu", "interleaved": False}, (20, 130), 320, 144),
    "rows first, cast": ("128x4c1r", {"activation": "swiglu", "quantize": "fp8"}, (3, 70), 272, 144),
    "rows first, apart, cast": (
        "128x4c1r",
        {"activation": "swiglu", "interleaved": False, "quantize": "fp8"},
        (190, 0, 70),
        320,
        272,
    ),
    "cast": ("64x5c2", {"activation": "swiglu", "interleaved": False, "quantize": "fp8"}, (130, 0, 7), 576, 144),
}


@pytest.mark.parametrize("name", few(CASES, "plain", "interleaved", "rows first, apart, cast"))
def test_the_kernel_computes_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)
    schedule_name, how, counts, columns, depth = CASES[name]
    how = {"activation": None, "interleaved": True, **how}
    quantized, in_columns = how.pop("quantize", None), how.pop("by_column", False)
    x, w = inputs(counts, 9, columns, depth)
    swiglu, apart = how["activation"] is not None, not how["interleaved"]
    tokens, width = torch.tensor(counts, dtype=torch.int32), columns // 2 if swiglu else columns
    scales = by_column(x.scales) if in_columns else x.scales
    given = check_operands(Fp8(x.data, scales), w, format_of(w), tokens, 1, **how)
    out = torch.full((len(x.data), width), float("nan"), dtype=FP8 if quantized else torch.bfloat16)
    out_scales = torch.full((len(x.data), -(-width // 128)), float("nan"))

    def multiply(by: str, out: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
        schedule = FP8_SCHEDULES[by]
        args = gemm.arguments(given, apart, out.data_ptr(), out_scales, schedule)
        kernel = gemm_kernel(FP8, swiglu, apart, schedule, out=out.dtype)
        run(kernel, args, blocks=2 * schedule.cluster, seed=len(name))

    multiply(schedule_name, out, out_scales if quantized else None)
    rows = slice(0, sum(counts))
    if quantized or not FP8_SCHEDULES[schedule_name].swapped:  # the bits of another schedule
        plain = torch.full((len(x.data), width), float("nan"), dtype=torch.bfloat16)
        multiply("64x5c2" if swiglu else "128x4c1", plain)
        same, scales = quantize(plain[rows]) if quantized else (plain[rows], out_scales[rows])
        assert torch.equal(out[rows].view(torch.uint8), same.view(torch.uint8))
        if quantized:
            assert torch.equal(out_scales[rows], scales) and bool(out_scales[rows.stop :].isnan().all())
            out = plain
    for group, want, off in expected_gemm(x, w, counts, alignment=1, dtype=out.dtype, device=CPU, **how):
        wrong = ~((out[group].double() - want).abs() <= off)
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()}: {wrong.nonzero()[:4].tolist()}"
    assert bool(out[rows.stop :].isnan().all())
    torch.testing.assert_close(out[rows], grouped_gemm(x, w, tokens, **how)[rows], rtol=2**-6, atol=1e-3)


ACTIVATIONS = activations(0.5)
CHANNELS: dict[str, tuple[str, torch.dtype, str | None, bool, tuple[int, ...], int, int]] = {
    "plain": ("64x8c1", FP8, None, True, (5, 0, 90), 328, 272),
    "interleaved, a pair": ("64x8c2", FP8, "geglu", True, (3, 70), 304, 144),
    "apart": ("128x6c1", FP8, "swiglu_limited", False, (20, 0, 140), 160, 272),
    "INT8": ("64x8c1", torch.int8, "swiglustep", False, (40, 3), 160, 144),
}


@pytest.mark.parametrize("name", few(CHANNELS, "apart", "INT8"))
def test_the_kernel_multiplies_by_scales_of_rows_and_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)
    schedule_name, dtype, kind, interleaved, counts, columns, depth = CHANNELS[name]
    gated = SWIGLU if kind is None else ACTIVATIONS[kind]
    g = torch.Generator().manual_seed(columns)
    rows, experts = sum(counts) + 9, len(counts)
    x, w = torch.randn(rows, depth, generator=g), torch.randn(experts, columns, depth, generator=g) / depth**0.5
    x *= torch.exp2(torch.randint(-4, 5, (rows, 1), generator=g))
    w *= torch.exp2(torch.randint(-2, 3, (experts, columns, 1), generator=g))
    bias = torch.randn(experts, columns, generator=g)
    pair, weights = quantize_rows(x, dtype), quantize_channels(w, dtype)
    about = {"interleaved": interleaved, "bias": bias}
    tokens = torch.tensor(counts, dtype=torch.int32)
    given = check_operands(pair, weights, format_of(weights), tokens, 1, kind and gated.name, **about)
    assert given.by_channel
    apart, how = kind is not None and not interleaved, gated.arguments() if kind else {}
    out = torch.full((rows, columns // (2 if kind else 1)), float("nan"), dtype=torch.bfloat16)
    schedule = SCHEDULES[schedule_name]
    args = gemm.arguments(given, apart, out.data_ptr(), None, schedule, 1, gated)
    epilogue = Epilogue(gated.kernel, True, True)
    kernel = gemm_kernel(given.x.dtype, kind is not None, apart, schedule, torch.bfloat16, epilogue)
    run(kernel, args, blocks=2 * schedule.cluster, seed=len(name))
    used = sum(counts)
    assert bool(out[used:].isnan().all())
    want = grouped_gemm(pair, weights, tokens, **how, **about, out_dtype=torch.bfloat16)
    torch.testing.assert_close(out[:used], want[:used], rtol=2**-7, atol=2**-10)  # sums in another order
    assert float((out[:used] == want[:used]).float().mean()) > 0.9


ORDERED = [  # schedules, and whether scales are those of channels
    *(("128x6c1", False), ("256x4c1", False), ("256x4c2u16", False), ("64x5c2", False), ("128x4c1r", False)),
    *(("256x4c1", True), ("256x4c2u16", True)),
]


@pytest.mark.parametrize(
    ("name", "by_channel"), few(ORDERED, ("256x4c2u16", False), ("64x5c2", False), ("256x4c2u16", True))
)
def test_a_dynamic_order_has_all_tiles(name: str, by_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a fixed order; each cluster asks once too often, and ends."""
    monkeypatch.setattr(tensor_maps, "encode", encode)
    schedule, counts, columns, depth = {**SCHEDULES, **FP8_SCHEDULES}[name], (300, 0, 40, 7), 328, 144
    g = torch.Generator().manual_seed(columns)
    x, w = torch.randn(360, depth, generator=g), torch.randn(4, columns, depth, generator=g) / depth**0.5
    if by_channel:
        pair: tuple[Any, Any] = quantize_rows(x, FP8), quantize_channels(w, FP8)
    elif name in FP8_SCHEDULES:
        pair = Fp8(*quantize(x)), quantize_weights(w)
    else:
        pair = x.bfloat16(), w.bfloat16()
    tokens = torch.tensor(counts, dtype=torch.int32)
    given = check_operands(*pair, format_of(pair[1]), tokens, 1, activation=None, interleaved=True)
    counter, outs, clusters = torch.zeros(1, dtype=torch.int32), [], 3
    for dynamic in (False, True):
        outs.append(torch.full((len(x), columns), float("nan"), dtype=torch.bfloat16))
        args = gemm.arguments(given, False, outs[-1].data_ptr(), None, schedule)
        if dynamic:
            args = type(args).from_buffer_copy(args)
            args.next_tile = counter.data_ptr()
        epilogue = Epilogue(channel_scales=by_channel)
        kernel = gemm_kernel(given.x.dtype, False, False, replace(schedule, dynamic=dynamic), torch.bfloat16, epilogue)
        run(kernel, args, blocks=clusters * schedule.cluster, seed=7)
    rows = sum(counts)
    assert torch.equal(outs[0][:rows], outs[1][:rows]) and bool(outs[1][rows:].isnan().all())
    assert not bool(outs[1][:rows].isnan().any())
    row_tiles = sum(-(-count // schedule.most_rows) for count in counts)
    assert int(counter) == row_tiles * args.grouping.column_tiles + clusters
