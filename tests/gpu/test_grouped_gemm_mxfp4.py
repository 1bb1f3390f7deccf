"""The grouped GEMM of MXFP4 weights on a GPU: the bits of the one for bfloat16, with the widened weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moecomm.fused import MXFP4_SCHEDULES, SCHEDULES, Mxfp4, grouped_gemm
from moecomm.fused.fp4 import dequantize
from moecomm.fused.kernels import Epilogue, gemm_kernel

from ..emulator.test_mxfp4_gemm import every_value
from .layers import compile_all
from .products import WIDENED, WidenedCase

pytestmark = pytest.mark.gpu1
BF16, PLAIN = torch.bfloat16, SCHEDULES["64x8c1"]  # of widened weights; all schedules have the same bits


@dataclass(frozen=True)
class Case(WidenedCase):
    batched: int = 0  # rows of an expert
    slack: int = 5  # rows behind the last expert's
    scales: tuple[int, int] = (118, 126)
    at: int = 0  # bytes before the first scale


CASES = {
    **{name: Case(**vars(case)) for name, case in WIDENED.items()},
    "without a bias": Case((130, 257, 17, 0, 64, 1), 2880, 2880),
    "scales anywhere": Case((3, 300, 0, 31), 160, 392, at=3),
    "interleaved": Case((5, 0, 130, 257), 288, 400, "swiglu"),
    "apart": Case((5, 0, 130, 257), 288, 400, "swiglu", False),
    "batched": Case((3, 300, 0, 31), 224, 264, batched=300),
    "all scales": Case((5, 64, 200), 256, 512, scales=(0, 256)),
    "large scales": Case((5, 64, 200), 256, 512, scales=(127, 140)),
    "more tiles than blocks": Case((700, 900), 320, 40 * 128),
    "all empty": Case((0, 0, 0), 64, 128, slack=20),
    "counts beyond the rows": Case((40, 1 << 20, 7), 64, 128, batched=50),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels into the cache, on all cores."""
    kinds = [
        (True, True, Epilogue("swigluoai", True)),
        (True, True, Epilogue("swiglu_limited")),
        (True, True, Epilogue("swiglustep")),
        (True, True, Epilogue()),
        (True, False, Epilogue()),
        (False, False, Epilogue("swiglu", True)),
        (False, False, Epilogue()),
    ]
    kernels = [
        gemm_kernel(BF16, gated, apart, schedule, BF16, epilogue, schedule is not PLAIN)
        for gated, apart, epilogue in kinds
        for schedule in (PLAIN, *MXFP4_SCHEDULES.values())
    ]
    compile_all(kernels)


def weights(case: Case) -> Mxfp4:
    g = torch.Generator("cuda").manual_seed(case.depth + case.columns)
    of_all = len(case.counts), case.columns
    data = torch.randint(0, 256, (*of_all, case.depth // 2), generator=g, device="cuda", dtype=torch.uint8)
    sizes = (*of_all, case.depth // 32)
    drawn = torch.randint(*case.scales, sizes, generator=g, device="cuda").to(torch.uint8)
    memory = torch.zeros(case.at + drawn.numel(), dtype=torch.uint8, device="cuda")
    scales = memory[case.at :].view(sizes)
    scales.copy_(drawn)
    return Mxfp4(data, scales)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All NaNs of sums are alike."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, -77.25), tensor).view(torch.int16)


@pytest.mark.parametrize("schedule", MXFP4_SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_widened_weights(name: str, schedule: str) -> None:
    case = CASES[name]
    g = torch.Generator("cuda").manual_seed(1)
    shape = (len(case.counts), case.batched) if case.batched else (sum(case.counts) + case.slack,)
    x = torch.randn(*shape, case.depth, generator=g, device="cuda").to(BF16)
    counts, w, how = case.device_counts(), weights(case), case.how(g)
    outs = [torch.full((*shape, case.outputs), -1.5, dtype=BF16, device="cuda") for _ in range(3)]
    for out in outs[:2]:
        grouped_gemm(x, w, counts, **how, out=out, schedule=MXFP4_SCHEDULES[schedule])
    grouped_gemm(x, dequantize(w), counts, **how, out=outs[2], schedule=PLAIN)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    wrong = bits(outs[0]) != bits(outs[2])
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()}: {wrong.nonzero()[:4].tolist()}"


def test_every_value_with_every_scale() -> None:
    w = every_value()
    w = Mxfp4(w.data.cuda(), w.scales.cuda())
    x, counts = torch.eye(64, dtype=BF16, device="cuda").repeat(3, 1), torch.full((3,), 64, device="cuda").int()
    found, plain = grouped_gemm(x, w, counts), dequantize(w)
    assert torch.equal(bits(found), bits(grouped_gemm(x, plain, counts, schedule=PLAIN)))
    finite = (w.scales.int() <= 251).all(dim=2)[:, None]  # infinity and NaN fill their row of the product
    same = found.view(3, 64, 256).float() == plain.transpose(1, 2).float()
    assert bool((same | ~finite).all()) and int(finite.sum()) > 700


def test_a_graph_replays_with_the_counts_that_it_finds() -> None:
    case = CASES["without a bias"]
    w, total = weights(case), sum(case.counts)
    x = torch.randn(total, case.depth, device="cuda").to(BF16)
    counts = case.device_counts()
    out = grouped_gemm(x, w, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, counts, out=out)
    for changed in ((0, total, 0, 0, 0, 0), (100, 0, 1, 2, 200, 3)):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        out.fill_(-1.5)
        graph.replay()
        wanted = grouped_gemm(x, dequantize(w), counts, out=torch.full_like(out, -1.5), schedule=PLAIN)
        assert torch.equal(bits(out), bits(wanted))
