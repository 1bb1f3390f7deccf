"""MXFP4 weights packed for FP8 rows: what they stand for, and products and layers with them on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import Placement
from moecomm.dispatch.reference import GROUP, quantize
from moecomm.errors import BadInput
from moecomm.fused import Fp8, Mxfp4, PackedMxfp4, fp4, grouped_gemm, interleave, pack_mxfp4, packed_mxfp4
from moecomm.fused.kernels import FP8
from moecomm.testing import LocalBuffers, random_layer

from ..test_moe import opened

E, N, K = 3, 48, 288
SIZES: dict[str, Any] = {"ranks": 1, "hidden": 96, "intermediate": 64, "num_experts": 4, "topk": 2, "max_tokens": 33}


def weights(seed: int, shape: tuple[int, int, int] = (E, N, K), least: int = 110, most: int = 121) -> Mxfp4:
    g, (experts, rows, columns) = torch.Generator().manual_seed(seed), shape
    data = torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8)
    scales = torch.randint(least, most + 1, (experts, rows, columns // 32), generator=g).to(torch.uint8)
    return Mxfp4(data, scales)


def as_fp8(w: PackedMxfp4, depth: int) -> Fp8:
    """Return the e4m3 values that the tensor cores multiply, of weights with one factor everywhere."""
    wide = packed_mxfp4.dequantize(w, depth).float()
    (factor,) = (((w.scales >> 20 & 15) | (w.scales >> 28 & 15) << 4) << 23).view(torch.float32).unique().tolist()
    data = (wide / factor).to(FP8)
    assert torch.equal(data.float() * factor, wide)
    experts, rows, columns = wide.shape
    return Fp8(data, torch.full((experts, -(-rows // GROUP), -(-columns // GROUP)), factor))


def with_one_factor(seed: int, shape: tuple[int, int, int] = (E, N, K)) -> Mxfp4:
    w = weights(seed, shape)
    w.scales[:, :, ::4] = 121
    w.data[:, :, ::64] |= 0x11  # not 0
    return w


def inputs(seed: int, rows: int, depth: int) -> Fp8:
    return Fp8(*quantize(torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).bfloat16()))


@pytest.mark.parametrize("depth", [32, 96, 128, 288, 384])
def test_packed_weights_stand_for_the_same_values(depth: int) -> None:
    w = weights(1, (E, N, depth))
    packed = pack_mxfp4(w)
    assert packed.data.shape == (E, N, -(-depth // 128) * 16) and packed.scales.shape == (E, -(-depth // 128), N)
    assert torch.equal(packed_mxfp4.dequantize(packed, depth), fp4.dequantize(w))
    assert not bool(packed_mxfp4.dequantize(packed)[:, :, depth:].any())
    scales = w.scales.view(torch.float8_e8m0fnu)
    assert all(map(torch.equal, packed, pack_mxfp4((w.data, scales))))


def test_small_scales_are_rounded_within_the_bound() -> None:
    w = weights(2, (E, 256, K), 1, 250)
    w.scales[0, :, 1] = 0
    w.data[0, :, 16:32] = 0x80  # zeros, of both signs, with the least scale
    wide, found = fp4.dequantize(w).double(), packed_mxfp4.dequantize(pack_mxfp4(w), K).double()
    counts = ((w.data & 0x77) != 0).view(E, 256, -1, 16).any(dim=3)
    scales = torch.nn.functional.pad(torch.where(counts, w.scales.int(), 0), (0, 3)).view(E, 256, 3, 4)
    largest = torch.exp2(scales.amax(dim=3).double() - 127).repeat_interleave(GROUP, dim=2)[:, :, :K]
    error = (found - wide).abs()
    assert bool((error <= largest * 2.0**-13).all()) and float(error.max()) > 0
    near = (scales.amax(dim=3, keepdim=True) - scales <= 11).flatten(2)[:, :, : K // 32].repeat_interleave(32, dim=2)
    assert not bool(error[near].any()) and 0 < int(near.sum()) < near.numel()


def test_every_scale_and_nan() -> None:
    """Scales of one group, with all others 0."""
    data = torch.zeros(1, 256, 64, dtype=torch.uint8)
    data[:, :, 16:32] = torch.arange(16).repeat_interleave(1).to(torch.uint8) * 17
    scales = torch.full((1, 256, 4), 127, dtype=torch.uint8)
    scales[0, :, 1] = torch.arange(256)
    packed = pack_mxfp4(Mxfp4(data, scales))
    wide, found = fp4.dequantize(Mxfp4(data, scales)), packed_mxfp4.dequantize(packed)
    assert torch.equal(found[0, :255], wide[0, :255]) and bool(found[0, 255].isnan().all())


@pytest.mark.parametrize("activation", [None, "swiglu", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_have_the_bits_of_fp8(activation: Any, interleaved: bool) -> None:
    shape = (E, 128, K)
    w, x = pack_mxfp4(with_one_factor(3, shape)), inputs(4, 20, K)
    counts, bias = torch.tensor((7, 0, 11), dtype=torch.int32), torch.randn(E, 128)
    how: dict[str, Any] = {"activation": activation, "interleaved": interleaved, "bias": bias}
    out = grouped_gemm(x, w, counts, **how)
    assert torch.equal(out[:18], grouped_gemm(x, as_fp8(w, K), counts, **how)[:18])
    assert torch.equal(out[:18], grouped_gemm(tuple(x), tuple(w), counts, **how)[:18])
    if activation is not None:
        cast = grouped_gemm(x, w, counts, **how, quantize="fp8")
        same = grouped_gemm(x, as_fp8(w, K), counts, **how, quantize="fp8")
        assert torch.equal(cast.data[:18].view(torch.uint8), same.data[:18].view(torch.uint8))
        assert torch.equal(cast.scales[:18], same.scales[:18])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_layer_has_the_bits_of_its_parts(interleaved: bool) -> None:
    case = random_layer(3, **SIZES, dtype=torch.bfloat16)
    w13, w2 = weights(5, (4, 128, 96), 119, 122), weights(6, (4, 96, 64), 119, 122)
    if interleaved:
        w13 = Mxfp4(*map(interleave, w13))
    call = case.call(0) | {"w13": pack_mxfp4(w13), "w2": pack_mxfp4(w2), "interleaved": interleaved, "bias": None}
    with opened(SIZES) as ranks:
        (buffer,) = ranks.buffers
        kinds = (PackedMxfp4._make, tuple)
        outs = [buffer.moe(**call | {name: kind(call[name]) for name in ("w13", "w2")}) for kind in kinds]
        routed = buffer.dispatch(call["x"], call["topk_idx"], call["topk_weights"], quantize="fp8")
        rows, counts = Fp8(routed.x, routed.scales), routed.tokens_per_expert
        inner = grouped_gemm(rows, call["w13"], counts, activation="swiglu", interleaved=interleaved)
        y = grouped_gemm(Fp8(*quantize(inner)), call["w2"], counts)
        want = buffer.combine(y, routed.handle, wire=call["wire"])
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("held", [[[3, -1, 0, 1], [2, 1, -1, 0]], [[0, 1, 2, 3], [3, 3, 0, 2]]])
def test_a_layer_does_not_depend_on_the_placement(held: list[list[int]]) -> None:
    """Replicas, empty slots and experts in any order; half of the rows of a rank go elsewhere than without."""
    drawn = random_layer(3, **{**SIZES, "ranks": 2}, dtype=torch.bfloat16)
    cases = [drawn.call(rank) for rank in range(2)]
    w13, w2 = (pack_mxfp4(weights(5 + i, (4, *of), 119, 122)) for i, of in enumerate(((128, 96), (96, 64))))
    sizes = {"hidden": 96, "num_experts": 4, "topk": 2, "max_tokens": 33, "backend": "host", "timeout_s": 20}
    outs = []
    for placement in (None, Placement(held)):
        with LocalBuffers(2, **sizes, **({} if placement is None else {"placement": placement})) as ranks:
            calls = []
            for buffer, call in zip(ranks.buffers, cases, strict=True):
                own = torch.tensor(list(buffer.local_experts)).clamp(min=0)
                mine = {name: PackedMxfp4(*(t[own] for t in w)) for name, w in (("w13", w13), ("w2", w2))}
                calls.append({**call, **mine, "interleaved": False, "bias": None, "wire": "rows"})
            outs.append(ranks.moe(calls))
    assert all(map(torch.equal, *outs))


def test_what_does_not_fit_is_named() -> None:
    w, x, counts = pack_mxfp4(weights(7)), inputs(8, 9, K), torch.tensor((3, 3, 3), dtype=torch.int32)
    bad: list[tuple[Any, Any, str]] = [
        (torch.zeros(9, K, dtype=torch.bfloat16), w, "x"),
        (x._replace(scales=x.scales[:, :1]), w, "x"),
        (inputs(8, 9, 128), w, "w"),
        (x, w._replace(scales=w.scales.transpose(1, 2)), "w"),
        (x, w._replace(scales=w.scales.long()), "w"),
        (x, w._replace(data=w.data[:, :, :-1].contiguous()), "w"),
    ]
    for rows, matrices, argument in bad:
        with pytest.raises(BadInput) as caught:
            grouped_gemm(rows, matrices, counts)
        assert caught.value.argument == argument
    for given in (w, torch.zeros(3), (weights(7).data,), (weights(7).data, torch.zeros(3))):
        with pytest.raises(BadInput, match="w"):
            pack_mxfp4(given)  # type: ignore[arg-type]
