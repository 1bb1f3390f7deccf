"""The grouped GEMM of FP8 on a GPU: every schedule against sums in double precision, exact ones to the bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moecomm.dispatch.reference import by_column, quantize
from moecomm.fused import FP8_SCHEDULES, Fp8, grouped_gemm, interleave, quantize_weights
from moecomm.fused.kernels import FP8, gemm_kernel

from .layers import compile_all
from .products import check, same_bits

pytestmark = pytest.mark.gpu1
BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = (5, 0, 130, 257, 17, 0, 64, 1)
ODD = (3, 300, 0, 31)
HEIGHTS = (1, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 385)


@dataclass(frozen=True)
class Case:
    """Sizes of a product."""

    counts: tuple[int, ...]
    depth: int
    columns: int
    alignment: int = 1
    activation: str | None = None
    interleaved: bool = True
    batched: int = 0  # rows of an expert
    slack: int = 0  # rows behind the last expert's
    whole: bool = True  # small whole numbers and scales that are powers of two: sums are exact in any order
    by_column: bool = False  # scales of x
    dtype: torch.dtype = BF16

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of grouped_gemm."""
        return {"alignment": self.alignment, "activation": self.activation, "interleaved": self.interleaved}


def scaled(most_rows: int, cluster: int) -> dict[str, Case]:
    """Cases that depend on the size of a tile: from one tile to more than there are multiprocessors."""
    column = 256 * cluster
    return {
        "one tile": Case((16,), 128, column),
        "two steps": Case((16,), 256, column),
        "ring wraps": Case((16,), 128 * 19, column),
        "full tile": Case((most_rows,), 512, column),
        "column tiles": Case((most_rows,), 256, 5 * column),
        "row tiles": Case((3 * most_rows + 7,), 384, 2 * column),
        "more tiles than blocks": Case((9 * most_rows + 5,), 640, 40 * 256),
    }


SWIGLU: dict[str, Any] = {"activation": "swiglu", "whole": False}
FIXED = {
    "ragged": Case(RAGGED, 400, 392, alignment=8, slack=37),
    "heights": Case(HEIGHTS, 400, 392, slack=5),
    "heights, swiglu": Case(HEIGHTS, 400, 592, **SWIGLU),
    "narrow": Case(ODD, 16, 8),
    "by column": Case((*ODD, 129), 272, 136, by_column=True),
    "batched": Case(ODD, 272, 264, batched=300),
    "fp16": Case((5, 0, 130, 257), 400, 392, dtype=FP16),
    "random": Case((100, 300, 0, 555), 1008, 1000, whole=False),
    "random, by column": Case((100, 300, 0, 555), 1008, 1000, whole=False, by_column=True),
    "swiglu": Case((100, 300, 0, 555), 1008, 1008, **SWIGLU),
    "ragged, swiglu": Case(RAGGED, 400, 400, alignment=8, slack=37, **SWIGLU),
    "batched, swiglu": Case(ODD, 272, 272, batched=300, **SWIGLU),
    "apart": Case((100, 300, 0, 555), 1008, 1088, interleaved=False, **SWIGLU),
    "apart, blocks of both": Case((100, 300, 0, 555), 1008, 320, interleaved=False, **SWIGLU),
    "all empty": Case((0, 0, 0), 128, 256, slack=20),
    "counts beyond the rows": Case((40, 1 << 20, 7), 128, 128, batched=50),
    "negative counts": Case((40, -5, 7), 128, 128, slack=3),
}
CASES = [
    (name, step)
    for name, schedule in FP8_SCHEDULES.items()
    for step in (*scaled(schedule.most_rows, schedule.cluster), *FIXED)
]
CASTS = ["swiglu", "heights, swiglu", "ragged, swiglu", "batched, swiglu", "apart", "apart, blocks of both"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels into the cache, on all cores."""
    kinds = [(False, False, BF16), (False, False, FP16), *itertools.product([True], [False, True], [BF16, FP8])]
    compile_all(
        gemm_kernel(FP8, *kind[:2], schedule, out=kind[2])
        for kind, schedule in itertools.product(kinds, FP8_SCHEDULES.values())
    )


def inputs(case: Case) -> tuple[Fp8, Fp8, torch.Tensor]:
    """Magnitudes differ by row of x and block of w, so that nobody has another's scale unseen."""
    g = torch.Generator().manual_seed(case.depth + case.columns)
    experts, across = len(case.counts), -(-case.depth // 128)
    rows = sum(-(-max(count, 0) // case.alignment) * case.alignment for count in case.counts) + case.slack
    rows = experts * case.batched if case.batched else rows
    row_scales = torch.exp2(torch.randint(-2, 3, (rows, across), generator=g))
    block_scales = torch.exp2(torch.randint(-2, 3, (experts, -(-case.columns // 128), across), generator=g))
    if case.whole:
        x = Fp8(torch.randint(-3, 4, (rows, case.depth), generator=g).to(FP8), row_scales)
        w = Fp8(torch.randint(-3, 4, (experts, case.columns, case.depth), generator=g).to(FP8), block_scales)
    else:
        wide = row_scales.repeat_interleave(128, dim=1)[:, : case.depth]
        x = Fp8(*quantize(torch.randn(rows, case.depth, generator=g) * wide))
        wide = block_scales.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
        matrices = torch.randn(experts, case.columns, case.depth, generator=g) / case.depth**0.5
        w = quantize_weights(matrices * wide[:, : case.columns, : case.depth])
    scales = x.scales.cuda()
    if case.by_column:
        scales = by_column(scales)
    x = Fp8(x.data.cuda(), scales)
    if case.batched:
        x = Fp8(*(part.view(experts, case.batched, -1) for part in x))
    return x, Fp8(*(part.cuda() for part in w)), torch.tensor(case.counts, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(("name", "step"), CASES)
def test_values_with_every_schedule(name: str, step: str) -> None:
    schedule = FP8_SCHEDULES[name]
    case = (scaled(schedule.most_rows, schedule.cluster) | FIXED)[step]
    x, w, counts = inputs(case)
    columns = case.columns // (2 if case.activation else 1)
    outs = []
    for _ in range(2):
        out = torch.full((*x.data.shape[:-1], columns), float("nan"), dtype=case.dtype, device="cuda")
        grouped_gemm(x, w, counts, **case.how, out=out, schedule=schedule)
        outs.append(out)
    check(case, x, w, case.counts, outs[0])
    assert same_bits(*outs)


@pytest.mark.parametrize("step", ["random", "heights, swiglu", "swiglu", "apart"])
def test_every_schedule_gives_the_same_bits(step: str) -> None:
    case = FIXED[step]
    x, w, counts = inputs(case)
    outs = [grouped_gemm(x, w, counts, **case.how, schedule=schedule) for schedule in FP8_SCHEDULES.values()]
    outs.append(grouped_gemm(x, w, counts, **case.how))
    assert all(same_bits(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("name", FP8_SCHEDULES)
@pytest.mark.parametrize("step", CASTS)
def test_a_product_is_cast_as_a_dispatch_casts_it(name: str, step: str) -> None:
    case, schedule = FIXED[step], FP8_SCHEDULES[name]
    x, w, counts = inputs(case)
    plain = grouped_gemm(x, w, counts, **case.how, schedule=schedule)
    nan = torch.full_like(plain, float("nan")).to(FP8)
    scales = torch.full((*plain.shape[:-1], -(-plain.shape[-1] // 128)), float("nan"), device="cuda")
    cast = grouped_gemm(x, w, counts, **case.how, schedule=schedule, quantize="fp8", out=(nan, scales))
    check(case, x, w, case.counts, torch.where(cast.scales[..., :1].isnan(), float("nan"), plain))
    rows = ~cast.scales[..., 0].flatten().isnan()
    data, wanted = quantize(plain.flatten(0, -2)[rows].cpu())  # on CPUs, whose divisions are exact
    assert same_bits(cast.data.flatten(0, -2).view(torch.uint8)[rows].cpu(), data)
    assert same_bits(cast.scales.flatten(0, -2)[rows].cpu(), wanted)


def test_a_cast_of_nothing_and_of_much() -> None:
    """Rows that are 0, and some as large as bfloat16 goes."""
    x, w, counts = inputs(Case((64, 64), 256, 512, **SWIGLU))
    x.data.view(torch.uint8)[:32] = 0
    x.scales[32:64] = 2.0**50
    x.scales[64:80] = 2.0**-60
    plain = grouped_gemm(x, w, counts, activation="swiglu")
    cast = grouped_gemm(x, w, counts, activation="swiglu", quantize="fp8")
    data, wanted = quantize(plain.cpu())
    assert float(plain.abs().max()) > 2.0**100 and not bool(plain[:32].any())
    assert same_bits(cast.data.cpu(), data) and same_bits(cast.scales.cpu(), wanted)


@pytest.mark.parametrize("name", FP8_SCHEDULES)
@pytest.mark.parametrize("columns", [64, 448, 1088])  # no whole tile, some and a part of one
def test_gate_and_up_rows_apart_give_the_same_bits(name: str, columns: int) -> None:
    """Where scales of blocks are alike: they are of w as it lies."""
    case = Case((100, 300, 0, 555), 1008, columns, **SWIGLU)
    x, w, counts = inputs(case)
    even = w.scales[:, :1].expand_as(w.scales).contiguous()
    woven = Fp8(interleave(w.data.view(torch.uint8)).view(FP8), even)
    how: dict[str, Any] = {"activation": "swiglu", "schedule": FP8_SCHEDULES[name]}
    outs = [
        grouped_gemm(x, woven, counts, **how),
        grouped_gemm(x, Fp8(w.data, even.unsqueeze(1)), counts, **how, interleaved=False),
    ]
    assert same_bits(*outs) and not bool(outs[0].isnan().any())


@pytest.mark.parametrize("name", FP8_SCHEDULES)
@pytest.mark.parametrize("casts", [False, True])
def test_a_graph_replays_with_the_counts_that_it_finds(name: str, casts: bool) -> None:
    case = FIXED["swiglu"]
    x, w, counts = inputs(case)
    how: dict[str, Any] = {**case.how, "schedule": FP8_SCHEDULES[name], "quantize": "fp8" if casts else None}
    out = grouped_gemm(x, w, counts, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, counts, **how, out=out)
    for changed in ((0, 500, 400, 55), (955, 0, 0, 0), (1, 2, 3, 4)):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        for part in out if casts else (out,):
            part.view(torch.uint8).fill_(0xFF)  # NaN
        graph.replay()
        if casts:
            again = grouped_gemm(x, w, counts, **how)
            rows = slice(0, sum(changed))
            assert all(same_bits(one[rows], other[rows]) for one, other in zip(out, again, strict=True))
            assert bool(out.scales[rows.stop :].isnan().all())
        else:
            check(case, x, w, changed, out)


def test_two_gemms_after_each_other() -> None:
    """The second takes what the first casts, rows of no expert among it."""
    first = FIXED["apart"]
    x, w13, counts = inputs(first)
    inner = grouped_gemm(x, w13, counts, **first.how, quantize="fp8")
    second = Case(first.counts, first.columns // 2, 1008, whole=False)
    _, w2, _ = inputs(second)
    out = grouped_gemm(inner, w2, counts)
    check(second, inner, w2, first.counts, out)


def test_no_rows() -> None:
    x, w, counts = inputs(Case((0, 0), 128, 256))
    assert grouped_gemm(x, w, counts).shape == (0, 256)
    cast = grouped_gemm(x, w, counts, activation="swiglu", quantize="fp8")
    assert cast.data.shape == (0, 128) and cast.scales.shape == (0, 1)
