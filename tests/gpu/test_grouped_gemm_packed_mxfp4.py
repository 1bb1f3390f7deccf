"""The grouped GEMM of FP8 rows and packed MXFP4 weights on a GPU: the bits of the FP8 kernel, and float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moecomm.dispatch.reference import GROUP
from moecomm.fused import (
    FP8_SCHEDULES,
    PACKED_SCHEDULES,
    Fp8,
    Mxfp4,
    PackedMxfp4,
    grouped_gemm,
    pack_mxfp4,
    packed_mxfp4,
)
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel

from ..emulator.test_packed_mxfp4_gemm import every_value, extremes
from ..fused.test_packed_mxfp4 import of_mxfp4, weights, wide
from .layers import compile_all
from .products import WIDENED, WidenedCase

pytestmark = pytest.mark.gpu1
BF16, OF_FP8 = torch.bfloat16, FP8_SCHEDULES["64x5c1"]  # all schedules have the same bits


@dataclass(frozen=True)
class Case(WidenedCase):
    cast: bool = False


CASES = {
    **{name: Case(**vars(case), cast=case.activation is not None) for name, case in WIDENED.items()},
    "without a bias": Case((130, 257, 17, 0, 64, 1), 1024, 2048),
    "interleaved": Case((5, 0, 130, 257), 288, 512, "swiglu", cast=True),
    "apart": Case((5, 0, 130, 257), 288, 512, "swiglu", False, cast=True),
    "more tiles than blocks": Case((700, 900), 320, 40 * 256),
    "all empty": Case((0, 0, 0), 64, 128),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels into the cache, on all cores."""
    kinds = [
        (True, True, Epilogue("swigluoai", True), FP8),
        (True, True, Epilogue("swiglu_limited"), FP8),
        (True, True, Epilogue("swiglustep"), FP8),
        (True, True, Epilogue(), FP8),
        (True, False, Epilogue(), FP8),
        (False, False, Epilogue("swiglu", True), BF16),
        (False, False, Epilogue(), BF16),
    ]
    compile_all(
        gemm_kernel(FP8, gated, apart, schedule, out, epilogue)
        for gated, apart, epilogue, out in kinds
        for schedule in (OF_FP8, *PACKED_SCHEDULES.values())
    )


def on_gpu(tensors: Any) -> Any:
    return type(tensors)(*(tensor.cuda() for tensor in tensors))


def rows_of(case: Case) -> tuple[Fp8, torch.Tensor]:
    g, rows = torch.Generator("cuda").manual_seed(1), sum(case.counts) + 5
    data = (torch.randn(rows, case.depth, generator=g, device="cuda") * 60).clamp(-448, 448).to(FP8)
    scales = torch.rand(rows, -(-case.depth // GROUP), generator=g, device="cuda") / 64 + 0.004
    return Fp8(data, scales), case.device_counts()


def bytes_of(x: Fp8, w: PackedMxfp4 | Fp8, counts: torch.Tensor, case: Case, schedule: Any) -> list[torch.Tensor]:
    """Return the bytes of a product whose memory was 0, and of its scales."""
    how = case.how(torch.Generator("cuda").manual_seed(2))
    out: Any = torch.zeros(len(x.data), case.outputs, dtype=BF16, device="cuda")
    if case.cast:
        out = Fp8(out.to(FP8), torch.zeros(len(out), -(-case.outputs // GROUP), device="cuda"))
        how["quantize"] = "fp8"
    grouped_gemm(x, w, counts, **how, out=out, schedule=schedule)
    return [tensor.view(torch.uint8) for tensor in (out if case.cast else (out,))]


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_fp8(name: str) -> None:
    case = CASES[name]
    plain = weights(case.columns, (len(case.counts), case.columns, case.depth))
    w = on_gpu(pack_mxfp4(plain))
    (x, counts), of_fp8 = rows_of(case), packed_mxfp4.unpack(w, case.depth)
    if case.depth * case.columns < 1 << 20:
        assert torch.equal(wide(PackedMxfp4(*(t.cpu() for t in w)), case.depth), of_mxfp4(plain))
    wanted = bytes_of(x, of_fp8, counts, case, OF_FP8)
    for label, schedule in PACKED_SCHEDULES.items():
        for _ in range(2):
            found = bytes_of(x, w, counts, case, schedule)
            assert all(map(torch.equal, found, wanted)), label


@pytest.mark.parametrize("schedule", PACKED_SCHEDULES)
def test_products_are_those_of_float64(schedule: str) -> None:
    case = CASES["without a bias"]
    w = on_gpu(pack_mxfp4(weights(3, (len(case.counts), case.columns, case.depth))))
    x, counts = rows_of(case)
    out, matrices = grouped_gemm(x, w, counts, schedule=PACKED_SCHEDULES[schedule]), wide(w)
    rows, begin = x.data.double() * x.scales.double().repeat_interleave(GROUP, dim=1)[:, : case.depth], 0
    for expert, count in enumerate(case.counts):
        place = slice(begin, begin + count)
        want, bound = rows[place] @ matrices[expert].T, rows[place].abs() @ matrices[expert].abs().T
        assert bool(((out[place].double() - want).abs() <= 2**-5 * bound + 2**-8 * want.abs()).all())
        begin += count


@pytest.mark.parametrize("schedule", PACKED_SCHEDULES)
@pytest.mark.parametrize("plain", [every_value(), extremes()], ids=("every value", "extremes"))
def test_every_value_with_every_scale(plain: Mxfp4, schedule: str) -> None:
    """Each row of x takes one column of the weights."""
    experts = len(plain.data)
    w, counts = on_gpu(pack_mxfp4(plain)), torch.full((experts,), 128, dtype=torch.int32, device="cuda")
    assert all(map(torch.equal, w, pack_mxfp4(on_gpu(plain))))
    for scale in (1.0, 2.0**-100, 2.0**100):
        rows = torch.eye(128, device="cuda").to(FP8).repeat(experts, 1)
        x = Fp8(rows, torch.full((128 * experts, 1), scale, device="cuda"))
        found = grouped_gemm(x, w, counts, schedule=PACKED_SCHEDULES[schedule]).float()
        wanted = grouped_gemm(x, packed_mxfp4.unpack(w), counts, schedule=OF_FP8).float()
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(), wanted.nan_to_num())
        want = scale * (rows.double().view(experts, 128, 128) @ wide(w).transpose(1, 2)).view(found.shape)
        normal = (want.abs() < 2.0**127) & (want.abs() > 2.0**-126)
        assert torch.equal(found[normal].double(), want[normal]) and bool(found[want.isnan()].isnan().all())


def test_a_graph_replays_with_the_counts_that_it_finds() -> None:
    case = CASES["without a bias"]
    w = on_gpu(pack_mxfp4(weights(4, (len(case.counts), case.columns, case.depth))))
    x, counts = rows_of(case)
    out = grouped_gemm(x, w, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, counts, out=out)
    for changed in ((0, len(x.data), 0, 0, 0, 0), (100, 0, 1, 2, 200, 3)):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        out.fill_(-1.5)
        graph.replay()
        assert torch.equal(out, grouped_gemm(x, w, counts, out=torch.full_like(out, -1.5)))
