"""The grouped GEMM of FP8 rows and packed MXFP4 weights on CPUs: the kernel has the bits of the FP8 kernel."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from moecomm.dispatch.reference import GROUP
from moecomm.fused import (
    FP8_SCHEDULES,
    PACKED_SCHEDULES,
    Fp8,
    Mxfp4,
    PackedMxfp4,
    gemm,
    pack_mxfp4,
    tensor_maps,
)
from moecomm.fused.activations import SWIGLU
from moecomm.fused.formats import format_of
from moecomm.fused.fp4 import dequantize
from moecomm.fused.fp8 import widen
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel
from moecomm.fused.operands import check_operands
from moecomm.fused.packed_mxfp4 import unpack
from moecomm.fused.schedules import Schedule
from moecomm.testing.layers import activations

from ..few import few
from .gemm_machine import encode, run

BF16, ACTIVATIONS = torch.bfloat16, activations(0.5)


@pytest.fixture(autouse=True)
def plain_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)


def product(
    x: Fp8,
    w: PackedMxfp4 | Fp8,
    counts: torch.Tensor,
    schedule: Schedule,
    name: str | None = None,
    interleaved: bool = True,
    bias: torch.Tensor | None = None,
    quantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    used = SWIGLU if name is None else ACTIVATIONS[name]
    if isinstance(w, Fp8) and name is not None and not interleaved:
        w = Fp8(w.data, w.scales.unsqueeze(1))  # of one grid of blocks
    given = check_operands(x, w, format_of(w), counts, 1, name and used.name, interleaved, bias)
    columns = given.w.shape[1] // (1 if name is None else 2)
    apart = name is not None and not interleaved
    out = torch.full((len(x.data), columns), float("nan"), dtype=BF16)
    scales = None
    if quantize:
        out, scales = out.to(FP8), torch.full((len(x.data), -(-columns // GROUP)), float("nan"))
    args = gemm.arguments(given, apart, out.data_ptr(), scales, schedule, 1, used)
    epilogue = Epilogue(used.kernel, bias is not None)
    kernel = gemm_kernel(FP8, name is not None, apart, schedule, out.dtype, epilogue)
    if schedule.dynamic:
        next_tile = torch.zeros(1, dtype=torch.int32)
        args = type(args).from_buffer_copy(args)
        args.next_tile = next_tile.data_ptr()
    run(kernel, args, blocks=2 * schedule.cluster, seed=columns)
    return out, scales


def rows_of(generator: torch.Generator, rows: int, depth: int) -> Fp8:
    data = (torch.randn(rows, depth, generator=generator) * 60).clamp(-448, 448).to(FP8)
    return Fp8(data, torch.rand(rows, -(-depth // GROUP), generator=generator) + 0.5)


def weights_of(generator: torch.Generator, shape: tuple[int, int, int]) -> Mxfp4:
    """Return weights that packing does not round; each block of 128 rows and 128 columns has a range of its own."""
    experts, columns, depth = shape
    data = torch.randint(0, 256, (experts, columns, depth // 2), generator=generator).to(torch.uint8)
    blocks = torch.randint(108, 116, (experts, -(-columns // GROUP), -(-depth // GROUP)), generator=generator)
    of_blocks = blocks.repeat_interleave(GROUP, dim=1).repeat_interleave(GROUP // 32, dim=2)
    of_data = of_blocks[:, :columns, : depth // 32] + torch.randint(
        15, (experts, columns, depth // 32), generator=generator
    )
    return Mxfp4(data, of_data.to(torch.uint8))


# Schedule, one of ACTIVATIONS, interleaved, rows, columns, depth, cast.
CASES: dict[str, tuple[str, str | None, bool, tuple[int, ...], int, int, bool]] = {
    "plain": ("64x3c1", None, True, (5, 0, 90, 1), 328, 288, False),
    "one step": ("64x3c1", None, True, (7, 64), 264, 32, False),
    "many steps": ("64x3c1", None, True, (64, 3), 136, 1120, False),
    "interleaved": ("64x3c1", "swiglu", True, (3, 150), 304, 160, True),
    "apart": ("64x3c1", "swigluoai", False, (20, 0, 100), 192, 288, False),
    "apart, cast": ("64x3c1", "swiglu_limited", False, (40, 129), 320, 576, True),
    "biases": ("64x3c1", "swigluoai", False, (60, 3), 320, 288, True),
    "rows first": ("128x3c1r", None, True, (129, 0, 64), 328, 544, False),
    "rows first, apart, cast": ("128x3c1r", "swiglustep", False, (150, 70), 448, 288, True),
    "rows first, many steps": ("128x3c1r", "swiglu", True, (100, 60), 304, 672, True),
    "rows first, dynamic": ("128x3c1rd", "swigluoai", False, (129, 60), 320, 288, True),
}


def wide_of(pair: Fp8, rows: int) -> torch.Tensor:
    return widen(pair.data.double(), pair.scales.double(), rows)


@pytest.mark.parametrize("name", few(CASES, "plain", "apart, cast", "rows first, apart, cast"))
def test_the_kernel_has_the_bits_of_the_kernel_for_fp8(name: str) -> None:
    schedule, activation, interleaved, counts, columns, depth, cast = CASES[name]
    g = torch.Generator().manual_seed(columns)
    experts, tokens = len(counts), torch.tensor(counts, dtype=torch.int32)
    plain, x = weights_of(g, (experts, columns, depth)), rows_of(g, sum(counts) + 9, depth)
    w, x = pack_mxfp4(plain), Fp8(x.data, x.scales / 256)
    of_fp8, rows = unpack(w, depth), sum(counts)
    assert torch.equal(wide_of(of_fp8, GROUP), dequantize(plain).double())
    bias = torch.randn(experts, columns, generator=g) if activation == "swigluoai" else None
    how = (activation, interleaved, bias, cast)
    found = product(x, w, tokens, PACKED_SCHEDULES[schedule], *how)
    wanted = product(x, of_fp8, tokens, FP8_SCHEDULES["64x5c1"], *how)
    for mine, other in zip(found, wanted, strict=True):
        if mine is not None and other is not None:
            assert torch.equal(*(t[:rows].contiguous().view(torch.uint8) for t in (mine, other)))
            assert bool(mine[rows:].float().isnan().all())
    if activation is None:
        matrices = wide_of(of_fp8, GROUP).repeat_interleave(tokens, dim=0)
        want, of_x = torch.empty(rows, columns, dtype=torch.float64), wide_of(x, 1)[:rows]
        for row in range(rows):
            want[row] = matrices[row] @ of_x[row]
        assert float((found[0][:rows].double() - want).abs().max() / want.abs().max()) < 0.01


@pytest.mark.parametrize("seed", few(range(24), 0))
def test_random_products_have_the_bits_of_fp8(seed: int) -> None:
    """Any sizes, groups and schedules; weights of any scales, rounded where they must be, with some NaNs."""
    drawn, g = random.Random(seed), torch.Generator().manual_seed(seed)
    schedule = drawn.choice(list(PACKED_SCHEDULES))
    activation = drawn.choice((None, *ACTIVATIONS))
    interleaved, cast = drawn.random() < 0.5, activation is not None and drawn.random() < 0.5
    unit = 8 if activation is None else 16 if interleaved else 64
    counts = [drawn.choice((0, 1, drawn.randint(2, 70), drawn.randint(60, 200))) for _ in range(drawn.randint(1, 3))]
    columns, depth = unit * drawn.randint(1, 600 // unit), 32 * drawn.randint(1, 20)
    shape = len(counts), columns, depth // 32
    scales = torch.randint(90, 130, shape, generator=g)
    scales = torch.where(torch.rand(shape, generator=g) < 0.01 * (seed % 2), 255, scales).to(torch.uint8)
    w = pack_mxfp4(Mxfp4(weights_of(g, (len(counts), columns, depth)).data, scales))
    x, tokens, rows = rows_of(g, sum(counts) + 9, depth), torch.tensor(counts, dtype=torch.int32), sum(counts)
    bias = torch.randn(len(counts), columns, generator=g) if drawn.random() < 0.5 else None
    found = product(x, w, tokens, PACKED_SCHEDULES[schedule], activation, interleaved, bias, cast)
    wanted = product(x, unpack(w, depth), tokens, FP8_SCHEDULES["64x5c1"], activation, interleaved, bias, cast)
    for mine, other in zip(found, wanted, strict=True):
        if mine is not None and other is not None:
            assert torch.equal(mine.isnan(), other.isnan()) and bool(mine[rows:].isnan().all())
            both = (torch.where(t.isnan(), 0, t.float())[:rows] for t in (mine, other))
            assert torch.equal(*(t.view(torch.int32) for t in both))


def every_value() -> Mxfp4:
    """Return every value with every difference of two scales, and with every scale."""
    codes = torch.arange(16) | torch.arange(16).flip(0) << 4
    data = codes.to(torch.uint8).repeat(4).expand(3, 256, 64).clone()
    scales = torch.full((3, 256, 4), 120, dtype=torch.uint8)
    scales[0, 1::2, 0] = 255
    data[0, 1::4, :16] = 0  # NaN, too
    scales[1, :, 1:3] = (120 - torch.arange(256).clamp(max=24)).to(torch.uint8)[:, None]
    scales[2] = (torch.arange(256) % 128 // 8 * 16 + torch.arange(256) // 128)[:, None]  # in one block
    return Mxfp4(data, scales)


def extremes() -> Mxfp4:
    """Return every value with the least and the largest scales, each in a block of its own."""
    data = every_value().data[:1].repeat(1, 2, 1)
    scales = torch.tensor([0, 1, 6, 254]).repeat_interleave(128).to(torch.uint8)[None, :, None].repeat(1, 1, 4)
    scales[:, ::3, 1] += (scales[:, ::3, 1] < 200).to(torch.uint8)
    return Mxfp4(data, scales)


@pytest.mark.parametrize("weights", [every_value, extremes])
@pytest.mark.parametrize("schedule", ["64x3c1", "128x3c1r"])
def test_every_value_with_every_scale(schedule: str, weights: Callable[[], Mxfp4]) -> None:
    """Each row of x takes one column of the weights, so that the product is the weights, times a power of two."""
    plain, of_x = weights(), 2.0**100 if weights is extremes else 1.0
    w, experts = pack_mxfp4(plain), len(plain.data)
    x = Fp8(torch.eye(128).to(FP8).repeat(experts, 1), torch.full((128 * experts, 1), 1 / of_x))
    counts = torch.full((experts,), 128, dtype=torch.int32)
    for rows in (x, Fp8(x.data, x.scales * of_x * of_x)):
        found, _ = product(rows, w, counts, PACKED_SCHEDULES[schedule])
        wanted, _ = product(rows, unpack(w), counts, FP8_SCHEDULES["64x5c1"])
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
        want = (wide_of(rows, 1).view(experts, 128, 128) @ wide_of(unpack(w), GROUP).transpose(1, 2)).view(found.shape)
        finite = want.isfinite() & (want.abs() < 2.0**127) & (want.abs() > 2.0**-126)
        assert torch.equal(found[finite].double(), want[finite]) and int(finite.sum()) > 10000
        assert bool(found[want.isnan()].isnan().all())
