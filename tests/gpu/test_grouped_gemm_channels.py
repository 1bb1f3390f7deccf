"""The grouped GEMM with scales of rows and channels on a GPU: every schedule, FP8 and INT8, against CPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moecomm.fused import SCHEDULES, Fp8, Int8, grouped_gemm, quantize_channels, quantize_rows
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel

from .layers import compile_all

pytestmark = pytest.mark.gpu1
KINDS = [FP8, torch.int8]
BF16 = torch.bfloat16
COUNTS = (0, 1, 7, 300, 16, 257, 0, 64)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kinds = [(False, False), (True, False), (True, True)]
    compile_all(
        gemm_kernel(kind, gated, apart, schedule, BF16, Epilogue("swiglu", bias, True))
        for kind, (gated, apart), schedule, bias in itertools.product(KINDS, kinds, SCHEDULES.values(), (False, True))
    )


def on_gpu(pair: Any) -> Any:
    return type(pair)(*(part.cuda() for part in pair))


def drawn(kind: torch.dtype, columns: int, depth: int) -> tuple[Any, Any, torch.Tensor]:
    """Rows and weights, each row and channel with a magnitude of its own; some rows are of no expert."""
    g = torch.Generator().manual_seed(columns + depth)
    rows, experts = sum(COUNTS) + 5, len(COUNTS)
    x, w = torch.randn(rows, depth, generator=g), torch.randn(experts, columns, depth, generator=g) / depth**0.5
    x *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g))
    w *= torch.exp2(torch.randint(-2, 3, (experts, columns, 1), generator=g))
    return quantize_rows(x, kind), quantize_channels(w, kind), torch.tensor(COUNTS, dtype=torch.int32)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(392, 400), (136, 1040), (8, 16)])
def test_exact_sums_have_the_bits_of_cpus(sizes: tuple[int, int], kind: torch.dtype, name: str) -> None:
    """Sums of whole numbers, and all of INT8."""
    columns, depth = sizes
    x, w, counts = drawn(kind, columns, depth)
    if kind is FP8:
        g = torch.Generator().manual_seed(0)
        x, w = (Fp8(torch.randint(-2, 3, pair.data.shape, generator=g).to(FP8), pair.scales) for pair in (x, w))
    bias = torch.randn(len(COUNTS), columns, generator=torch.Generator().manual_seed(1))
    for added in (None, bias):
        want = grouped_gemm(x, w, counts, bias=added, out_dtype=BF16)
        out = torch.full(want.shape, float("nan"), dtype=BF16, device="cuda")
        more = {} if added is None else {"bias": added.cuda()}
        grouped_gemm(on_gpu(x), on_gpu(w), counts.cuda(), **more, out=out, schedule=SCHEDULES[name])
        used = sum(COUNTS)
        assert torch.equal(out[:used].cpu(), want[:used]) and bool(out[used:].isnan().all())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_activated_values_are_near_those_of_cpus(interleaved: bool, kind: torch.dtype, name: str) -> None:
    x, w, counts = drawn(kind, 592, 1040)
    how: dict[str, Any] = {"activation": "swiglu", "interleaved": interleaved}
    want = grouped_gemm(x, w, counts, **how, out_dtype=BF16)[: sum(COUNTS)].float()
    out = grouped_gemm(on_gpu(x), on_gpu(w), counts.cuda(), **how, schedule=SCHEDULES[name])
    off = out[: sum(COUNTS)].cpu().float() - want
    assert float(off.norm()) <= 2e-3 * float(want.norm())
    again = grouped_gemm(on_gpu(x), on_gpu(w), counts.cuda(), **how)
    assert torch.equal(out[: sum(COUNTS)], again[: sum(COUNTS)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_a_matrix_is_that_of_every_channel(kind: torch.dtype) -> None:
    x, w, counts = drawn(kind, 264, 272)
    x, w, counts = on_gpu(x), on_gpu(w), counts.cuda()
    pair = Fp8 if kind is FP8 else Int8
    of = torch.rand(len(COUNTS), device="cuda")
    one = grouped_gemm(pair(x.data, torch.full((1,), 0.5, device="cuda")), pair(w.data, of), counts)
    rows = torch.full((len(x.data), 1), 0.5, device="cuda")
    other = grouped_gemm(pair(x.data, rows), pair(w.data, of[:, None].expand(-1, 264).contiguous()), counts)
    assert torch.equal(one[: sum(COUNTS)], other[: sum(COUNTS)])


def test_batched_rows() -> None:
    x, w, _ = drawn(FP8, 264, 272)
    data = Fp8(x.data[:640].view(8, 80, 272), x.scales[:640].view(8, 80, 1))
    counts = torch.tensor((3, 0, 80, 1, 64, 17, 0, 5), dtype=torch.int32)
    want = grouped_gemm(data, w, counts, out_dtype=BF16).float()
    out = grouped_gemm(on_gpu(data), on_gpu(w), counts.cuda()).cpu().float()
    for group, count in enumerate(counts.tolist()):
        off = out[group, :count] - want[group, :count]
        assert float(off.norm()) <= 4e-3 * float(want[group, :count].norm()) + 1e-6
