"""The grouped GEMM of FP8 rows and packed MXFP4 weights on CPUs: the kernel has the products of the widened weights."""

from __future__ import annotations

import pytest
import torch

from moecomm.base.choices import Activation
from moecomm.dispatch.reference import GROUP
from moecomm.fused import (
    FP8_SCHEDULES,
    PACKED_SCHEDULES,
    Fp8,
    Mxfp4,
    PackedMxfp4,
    gemm,
    pack_mxfp4,
    reference,
    tensor_maps,
)
from moecomm.fused.activations import GatedActivation
from moecomm.fused.formats import format_of
from moecomm.fused.fp4 import dequantize as widen_mxfp4
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel
from moecomm.fused.operands import check_operands
from moecomm.fused.packed_mxfp4 import dequantize
from moecomm.fused.schedules import Schedule

from ..few import few
from ..fused.test_packed_mxfp4 import as_fp8, with_one_factor
from .gemm_machine import encode, run

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def plain_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)


def product(
    x: Fp8,
    w: PackedMxfp4 | Fp8,
    counts: torch.Tensor,
    schedule: Schedule,
    activation: Activation | None = None,
    interleaved: bool = True,
    bias: torch.Tensor | None = None,
    quantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    given = check_operands(x, w, format_of(w), counts, 1, activation, interleaved, bias)
    columns = given.w.shape[1] // (1 if activation is None else 2)
    apart, gated = activation is not None and not interleaved, GatedActivation(activation or "swiglu")
    out = torch.full((len(x.data), columns), float("nan"), dtype=BF16)
    scales = None
    if quantize:
        out, scales = out.to(FP8), torch.full((len(x.data), -(-columns // GROUP)), float("nan"))
    args = gemm.arguments(given, apart, out.data_ptr(), scales, schedule, 1, gated)
    epilogue = Epilogue(gated.name, bias is not None)
    kernel = gemm_kernel(FP8, activation is not None, apart, schedule, out.dtype, epilogue, given.mxfp4)
    run(kernel, args, blocks=2 * schedule.cluster, seed=columns)
    return out, scales


def rows_of(generator: torch.Generator, rows: int, depth: int) -> Fp8:
    data = (torch.randn(rows, depth, generator=generator) * 60).clamp(-448, 448).to(FP8)
    return Fp8(data, torch.rand(rows, -(-depth // GROUP), generator=generator) + 0.5)


def weights_of(generator: torch.Generator, shape: tuple[int, int, int], scales: tuple[int, int]) -> Mxfp4:
    experts, columns, depth = shape
    data = torch.randint(0, 256, (experts, columns, depth // 2), generator=generator).to(torch.uint8)
    of_data = torch.randint(*scales, (experts, columns, depth // 32), generator=generator).to(torch.uint8)
    return Mxfp4(data, of_data)


# Schedule, activation, interleaved, rows, columns, depth, cast.
CASES: dict[str, tuple[str, Activation | None, bool, tuple[int, ...], int, int, bool]] = {
    "plain": ("64x8c1", None, True, (5, 0, 90, 1), 328, 288, False),
    "one group": ("64x8c1", None, True, (7, 64), 264, 32, False),
    "interleaved": ("64x8c1", "swiglu", True, (3, 150), 304, 160, True),
    "apart": ("64x8c1", "swigluoai", False, (20, 0, 100), 192, 288, False),
    "apart, cast": ("64x8c1", "swigluoai", False, (40, 129), 320, 576, True),
    "biases": ("64x8c1", "swigluoai", False, (60, 3), 320, 288, True),
}


@pytest.mark.parametrize("name", few(CASES, "plain", "apart, cast", "biases"))
def test_the_kernel_has_the_products_of_widened_weights(name: str) -> None:
    schedule, activation, interleaved, counts, columns, depth, cast = CASES[name]
    g = torch.Generator().manual_seed(columns)
    experts, tokens = len(counts), torch.tensor(counts, dtype=torch.int32)
    plain = weights_of(g, (experts, columns, depth), (112, 123))
    w, x = pack_mxfp4(plain), rows_of(g, sum(counts) + 9, depth)
    x = Fp8(x.data, x.scales / 256)
    bias = torch.randn(experts, columns, generator=g) if activation == "swigluoai" else None
    found, scales = product(x, w, tokens, PACKED_SCHEDULES[schedule], activation, interleaved, bias, cast)
    wanted = torch.full(found.shape, float("nan"))
    wide = widen_mxfp4(plain)
    assert torch.equal(dequantize(w, depth), wide)
    how = {"alignment": 1, "activation": None if activation is None else GatedActivation(activation)}
    reference.grouped_gemm(x, wide, tokens, **how, interleaved=interleaved, out=wanted, bias=bias)
    rows, got = sum(counts), found.float()
    if scales is not None:
        got = got * scales.repeat_interleave(GROUP, dim=1)[:, : got.shape[1]]
    error = (got - wanted)[:rows].abs().max() / wanted[:rows].abs().max()
    assert float(error) < (0.07 if cast else 0.01) and bool(found[rows:].float().isnan().all())


@pytest.mark.parametrize("name", few(CASES, "apart, cast", "biases"))
def test_the_kernel_has_the_bits_of_the_kernel_for_fp8(name: str) -> None:
    schedule, activation, interleaved, counts, columns, depth, cast = CASES[name]
    g = torch.Generator().manual_seed(columns)
    experts, tokens = len(counts), torch.tensor(counts, dtype=torch.int32)
    w, x = pack_mxfp4(with_one_factor(columns, (experts, columns, depth))), rows_of(g, sum(counts) + 9, depth)
    x = Fp8(x.data, x.scales / 256)
    bias = torch.randn(experts, columns, generator=g) if activation == "swigluoai" else None
    found = product(x, w, tokens, PACKED_SCHEDULES[schedule], activation, interleaved, bias, cast)
    wanted = product(x, as_fp8(w, depth), tokens, FP8_SCHEDULES["64x5c1"], activation, interleaved, bias, cast)
    for mine, other in zip(found, wanted, strict=True):
        if mine is not None and other is not None:
            assert torch.equal(*(t[: sum(counts)].contiguous().view(torch.uint8) for t in (mine, other)))


def every_value() -> Mxfp4:
    """Return every value with every difference of two scales, and with every scale."""
    codes = torch.arange(16) | torch.arange(16).flip(0) << 4
    data = codes.to(torch.uint8).repeat(4).expand(3, 256, 64).clone()
    scales = torch.full((3, 256, 4), 120, dtype=torch.uint8)
    scales[0, :, 0] = torch.arange(256)
    scales[1, :, 1:3] = (120 - torch.arange(256).clamp(max=24)).to(torch.uint8)[:, None]
    scales[2] = torch.arange(256)[:, None]
    return Mxfp4(data, scales)


def test_every_value_with_every_scale() -> None:
    """Each row of x takes one column of the weights, so that the product is the weights, widened."""
    w = pack_mxfp4(every_value())
    x, counts = Fp8(torch.eye(128).to(FP8).repeat(3, 1), torch.ones(384, 1)), torch.full((3,), 128, dtype=torch.int32)
    found, _ = product(x, w, counts, PACKED_SCHEDULES["64x8c1"])
    wide, finite = dequantize(w), (every_value().scales.int() <= 251).all(dim=2)[:, None]
    same = found.view(3, 128, 256).float() == wide.transpose(1, 2).float()
    assert bool((same | ~finite).all()) and int(finite.sum()) > 700
    assert bool(found.view(3, 128, 256)[0, :, 255].isnan().all())
