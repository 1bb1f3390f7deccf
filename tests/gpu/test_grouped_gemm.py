"""The grouped GEMM on a GPU: every schedule against sums in double precision."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moecomm.fused import SCHEDULES, deinterleave, grouped_gemm
from moecomm.fused.kernels import gemm_kernel

from .layers import compile_all
from .products import check, same_bits

pytestmark = pytest.mark.gpu1
BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = (5, 0, 130, 257, 17, 0, 64, 1)
ODD = (3, 300, 0, 31)


@dataclass(frozen=True)
class Case:
    """Sizes of a product.  Names of `scaled`: columns count tiles of a cluster, rows count tiles."""

    counts: tuple[int, ...]
    depth: int
    columns: int
    dtype: torch.dtype = BF16
    alignment: int = 1
    activation: str | None = None
    batched: int = 0  # rows of an expert
    slack: int = 0  # rows behind the last expert's
    whole: bool = True  # small whole numbers, whose sums are exact in any order
    scale: float = 1.0  # of x

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of grouped_gemm."""
        return {"alignment": self.alignment, "activation": self.activation, "interleaved": True}


def scaled(most_rows: int, cluster: int) -> dict[str, Case]:
    """Cases that depend on the size of a tile: from one tile to more than there are multiprocessors."""
    column = 128 * cluster
    return {
        "one tile": Case((16,), 64, column),
        "two steps": Case((16,), 128, column),
        "ring wraps": Case((16,), 64 * 19, column),
        "full tile": Case((most_rows,), 256, column),
        "column tiles": Case((most_rows,), 128, 5 * column),
        "row tiles": Case((3 * most_rows + 7,), 192, 2 * column),
        "more tiles than blocks": Case((9 * most_rows + 5,), 320, 40 * 128),
        "swiglu, one tile": Case((16,), 64, column, activation="swiglu"),
    }


FIXED = {
    "ragged": Case(RAGGED, 200, 392, alignment=8, slack=37),
    "narrow": Case(ODD, 8, 8),
    "alignment 1": Case((*ODD, 129), 72, 136),
    "batched": Case(ODD, 136, 264, batched=300),
    "ragged, swiglu": Case(RAGGED, 200, 400, alignment=8, slack=37, activation="swiglu"),
    "batched, swiglu": Case(ODD, 136, 272, batched=300, activation="swiglu"),
    "steep gates": Case(ODD, 64, 128, activation="swiglu", scale=64),
    "fp16": Case((5, 0, 130, 257), 200, 392, FP16),
    "fp16, swiglu": Case((5, 0, 130, 257), 200, 400, FP16, activation="swiglu"),
    "random": Case((100, 300, 0, 555), 1000, 1000, whole=False),
    "random, swiglu": Case((100, 300, 0, 555), 1000, 1008, whole=False, activation="swiglu"),
    "random, fp16": Case((100, 300, 0, 555), 1000, 1000, FP16, whole=False),
    "all empty": Case((0, 0, 0), 64, 128, slack=20),
    "counts beyond the rows": Case((40, 1 << 20, 7), 64, 128, batched=50),
    "negative counts": Case((40, -5, 7), 64, 128, slack=3),
}
CASES = [
    (name, step)
    for name, schedule in SCHEDULES.items()
    for step in (*scaled(schedule.most_rows, schedule.cluster), *FIXED)
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels into the cache, on all cores."""
    activations = ((False, False), (True, False), (True, True))
    kinds = itertools.product((BF16, FP16), activations, SCHEDULES.values())
    compile_all(gemm_kernel(dtype, *activation, schedule) for dtype, activation, schedule in kinds)


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(case.depth + case.columns)
    experts = len(case.counts)
    rows = sum(-(-max(count, 0) // case.alignment) * case.alignment for count in case.counts) + case.slack
    shape = (experts, case.batched, case.depth) if case.batched else (rows, case.depth)
    weights = (experts, case.columns, case.depth)
    if case.whole:
        x = torch.randint(-3, 4, shape, generator=generator, device="cuda").to(case.dtype)
        w = torch.randint(-3, 4, weights, generator=generator, device="cuda").to(case.dtype)
        if case.activation:
            x, w = x / 8, w / 8
    else:
        x = torch.randn(shape, generator=generator, device="cuda").to(case.dtype)
        w = (torch.randn(weights, generator=generator, device="cuda") / case.depth**0.5).to(case.dtype)
    return x * case.scale, w, torch.tensor(case.counts, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(("name", "step"), CASES)
def test_values_with_every_schedule(name: str, step: str) -> None:
    schedule = SCHEDULES[name]
    case = (scaled(schedule.most_rows, schedule.cluster) | FIXED)[step]
    x, w, counts = inputs(case)
    columns = case.columns // (2 if case.activation else 1)
    outs = []
    for _ in range(2):
        out = torch.full((*x.shape[:-1], columns), float("nan"), dtype=case.dtype, device="cuda")
        grouped_gemm(x, w, counts, **case.how, out=out, schedule=schedule)
        outs.append(out)
    check(case, x, w, case.counts, outs[0])
    assert same_bits(*outs)


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_every_schedule_gives_the_same_bits(activation: str | None) -> None:
    x, w, counts = inputs(Case((100, 300, 0, 555), 1000, 1008, whole=False))
    outs = [grouped_gemm(x, w, counts, activation=activation, schedule=schedule) for schedule in SCHEDULES.values()]
    outs.append(grouped_gemm(x, w, counts, activation=activation))
    assert all(same_bits(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("columns", [16, 400, 1008])  # no whole tile, some and a part of one
def test_gate_and_up_rows_apart_give_the_same_bits(name: str, dtype: torch.dtype, columns: int) -> None:
    x, w, counts = inputs(Case((100, 300, 0, 555), 1000, columns, dtype, whole=False))
    outs = [torch.full((len(x), columns // 2), float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    how = {"activation": "swiglu", "schedule": SCHEDULES[name]}
    grouped_gemm(x, w, counts, **how, out=outs[0])
    grouped_gemm(x, deinterleave(w), counts, **how, interleaved=False, out=outs[1])
    assert same_bits(*outs) and not bool(outs[0].isnan().any())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_graph_replays_with_the_counts_that_it_finds(name: str) -> None:
    case = FIXED["random"]
    x, w, counts = inputs(case)
    out = grouped_gemm(x, w, counts, schedule=SCHEDULES[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, counts, out=out, schedule=SCHEDULES[name])
    for changed in ((0, 500, 400, 55), (955, 0, 0, 0), (1, 2, 3, 4)):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        check(case, x, w, changed, out)


def test_no_rows_and_a_thread_without_a_context() -> None:
    x, w, counts = inputs(Case((0, 0), 64, 128))
    assert grouped_gemm(x, w, counts).shape == (0, 128)
    x, w, counts = inputs(Case((20, 30), 64, 128))
    outs = [grouped_gemm(x, w, counts)]
    thread = threading.Thread(target=lambda: outs.append(grouped_gemm(x, w, counts)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(*outs)
