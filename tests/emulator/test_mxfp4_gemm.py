"""The grouped GEMM of MXFP4 weights on CPUs: the kernel has the bits of the one for bf16, with widened weights."""

from __future__ import annotations

import pytest
import torch

from moecomm.fused import MXFP4_SCHEDULES, SCHEDULES, Mxfp4, gemm, tensor_maps
from moecomm.fused.activations import SWIGLU
from moecomm.fused.formats import format_of
from moecomm.fused.fp4 import dequantize
from moecomm.fused.kernels import Epilogue, gemm_kernel
from moecomm.fused.operands import check_operands
from moecomm.fused.schedules import Schedule
from moecomm.testing.layers import activations

from ..few import few
from .gemm_machine import encode, run

BF16, ACTIVATIONS = torch.bfloat16, activations(0.5)


@pytest.fixture(autouse=True)
def plain_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)


def product(
    x: torch.Tensor,
    w: torch.Tensor | Mxfp4,
    counts: torch.Tensor,
    schedule: Schedule,
    name: str | None = None,
    interleaved: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    used = SWIGLU if name is None else ACTIVATIONS[name]
    given = check_operands(x, w, format_of(w), counts, 1, name and used.name, interleaved, bias)
    columns = given.w.shape[1] // (1 if name is None else 2)
    apart = name is not None and not interleaved
    out = torch.full((len(x), columns), float("nan"), dtype=BF16)
    args = gemm.arguments(given, apart, out.data_ptr(), None, schedule, 1, used)
    epilogue = Epilogue(used.kernel, bias is not None)
    kernel = gemm_kernel(BF16, name is not None, apart, schedule, BF16, epilogue, given.mxfp4)
    run(kernel, args, blocks=2 * schedule.cluster, seed=columns)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs are alike."""
    return tensor.nan_to_num(nan=-77.25, posinf=float("inf"), neginf=float("-inf")).view(torch.int16)


# Schedule, one of ACTIVATIONS, interleaved, rows, columns, depth: 3, 5, 9 and 18 scales a row, at any address.
CASES: dict[str, tuple[str, str | None, bool, tuple[int, ...], int, int]] = {
    "plain": ("64x7c1", None, True, (5, 0, 90, 1), 328, 288),
    "three scales": ("64x7c1", None, True, (7, 64), 264, 96),
    "interleaved": ("128x4c1", "swiglu", True, (3, 150), 304, 160),
    "apart": ("160x3c1", "swigluoai", False, (20, 0, 300), 160, 288),
    "18 scales": ("128x4c1", "swiglu_limited", False, (40, 129), 272, 576),
    "two blocks": ("48x3c1p2", "swiglustep", False, (60, 3), 272, 288),
    "tall": ("192x3c1", "geglu", False, (200, 0, 1), 272, 160),
}


@pytest.mark.parametrize("name", few(CASES, "plain", "18 scales", "two blocks"))
def test_the_kernel_has_the_bits_of_the_kernel_for_bf16(name: str) -> None:
    schedule, activation, interleaved, counts, columns, depth = CASES[name]
    g = torch.Generator().manual_seed(columns)
    experts, tokens = len(counts), torch.tensor(counts, dtype=torch.int32)
    data = torch.randint(0, 256, (experts, columns, depth // 2), generator=g)
    scales = torch.randint(118, 126, (experts, columns, depth // 32), generator=g)
    w = Mxfp4(data.to(torch.uint8), scales.to(torch.uint8))
    x = torch.randn(sum(counts) + 9, depth, generator=g).to(BF16)
    bias = torch.randn(experts, columns, generator=g) if activation in ("swigluoai", "swiglustep") else None
    found = product(x, w, tokens, MXFP4_SCHEDULES[schedule], activation, interleaved, bias)
    wanted = product(x, dequantize(w), tokens, SCHEDULES["64x8c1"], activation, interleaved, bias)
    assert torch.equal(bits(found), bits(wanted)) and not bool(wanted[: sum(counts)].isnan().any())
    assert bool(found[sum(counts) :].isnan().all())


def every_value() -> Mxfp4:
    """Return every value with every scale, zeros with every scale, and every value with the least that is too large."""
    codes = torch.arange(16) | torch.arange(16).flip(0) << 4  # every value at even and odd columns
    data = codes.to(torch.uint8).repeat(2).expand(3, 256, 32).clone()
    data[1] = 0
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(3, 1, 2)
    scales[:, :, 1] = scales[:, :, 0].flip(1)
    scales[2] = 129
    return Mxfp4(data, scales)


def test_every_value_with_every_scale() -> None:
    """Each row of x takes one column of the weights, so that the product is the weights, widened."""
    w, x, counts = every_value(), torch.eye(64, dtype=BF16).repeat(3, 1), torch.full((3,), 64, dtype=torch.int32)
    found, plain = product(x, w, counts, MXFP4_SCHEDULES["64x7c1"]), dequantize(w)
    assert torch.equal(bits(found), bits(product(x, plain, counts, SCHEDULES["64x8c1"])))
    finite = (w.scales.int() <= 251).all(dim=2)[:, None]  # infinity and NaN fill their row of the product
    same = found.view(3, 64, 256).float() == plain.transpose(1, 2).float()
    assert bool((same | ~finite).all()) and int(finite.sum()) > 700
