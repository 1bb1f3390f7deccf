"""MXFP4 weights packed for FP8 rows: what they stand for, and products and layers with them on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import Placement
from moecomm.dispatch.reference import GROUP, quantize
from moecomm.errors import BadInput
from moecomm.fused import Fp8, Mxfp4, PackedMxfp4, fp4, grouped_gemm, interleave, pack_mxfp4, packed_mxfp4
from moecomm.fused.fp8 import widen
from moecomm.testing import LocalBuffers, random_layer

from ..test_moe import opened

E, N, K = 3, 48, 288
SIZES: dict[str, Any] = {"ranks": 1, "hidden": 96, "intermediate": 64, "num_experts": 4, "topk": 2, "max_tokens": 33}


def weights(seed: int, shape: tuple[int, int, int] = (E, N, K), least: int = 110, most: int = 121) -> Mxfp4:
    g, (experts, rows, columns) = torch.Generator().manual_seed(seed), shape
    data = torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8)
    scales = torch.randint(least, most + 1, (experts, rows, columns // 32), generator=g).to(torch.uint8)
    return Mxfp4(data, scales)


def inputs(seed: int, rows: int, depth: int) -> Fp8:
    return Fp8(*quantize(torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).bfloat16()))


def wide(w: PackedMxfp4, depth: int | None = None) -> torch.Tensor:
    data, scales = packed_mxfp4.unpack(w, depth)
    return widen(data.double(), scales.double(), GROUP)


def of_mxfp4(w: Mxfp4) -> torch.Tensor:
    """Return the values in float64, which has them all."""
    low, high = (w.data.int() >> shift & 15 for shift in (0, 4))
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.stack([torch.where(code > 7, -1.0, 1.0) * table[code & 7] for code in (low, high)], -1).flatten(2)
    factors = torch.where(w.scales == 255, torch.nan, torch.exp2(w.scales.double() - 127))
    return values * factors.repeat_interleave(32, dim=2)


@pytest.mark.parametrize("depth", [32, 96, 128, 288, 384])
@pytest.mark.parametrize("rows", [48, 128, 200])
def test_packed_weights_stand_for_the_same_values(rows: int, depth: int) -> None:
    w = weights(1, (E, rows, depth), 107, 121)
    packed, steps = pack_mxfp4(w), -(-depth // 128)
    assert packed.data.shape == (E, rows, steps * 16) and packed.scales.shape == (E, steps, rows)
    assert torch.equal(wide(packed, depth), of_mxfp4(w)) and torch.equal(of_mxfp4(w), fp4.dequantize(w).double())
    data, scales = packed_mxfp4.unpack(packed)
    assert scales.shape == (E, -(-rows // GROUP), steps) and not bool(data[:, :, depth:].view(torch.uint8).any())
    signs = torch.stack((w.data >> 3 & 1, w.data >> 7), dim=-1).flatten(2).bool()
    assert torch.equal(data[:, :, :depth].view(torch.uint8) >= 128, signs)  # of zeros, too
    as_scales = w.scales.view(torch.float8_e8m0fnu)
    assert all(map(torch.equal, packed, pack_mxfp4((w.data, as_scales))))


def test_small_scales_are_rounded_within_the_bound() -> None:
    w = weights(2, (E, 200, K), 1, 250)
    w.scales[1] = w.scales[1].int().clamp(max=50).to(torch.uint8)
    w.scales[1, ::2] = torch.randint(30, 51, (100, K // 32)).to(torch.uint8)
    w.scales[0, :, 1] = 0
    w.data[0, :, 16:32] = 0x80  # zeros, of both signs, with the least scale
    want, found = of_mxfp4(w), wide(pack_mxfp4(w), K)
    counts = ((w.data & 0x77) != 0).view(E, 200, -1, 16).any(dim=3)
    scales = torch.nn.functional.pad(torch.where(counts, w.scales.int(), 0), (0, 3, 0, 56)).view(E, 2, 128, 3, 4)
    of_blocks = scales.amax(dim=(2, 4), keepdim=True)
    largest = torch.exp2(of_blocks.double() - 127).expand_as(scales).reshape(E, 256, 12)[:, :200, : K // 32]
    largest = largest.repeat_interleave(32, dim=2)
    error = (found - want).abs()
    assert bool((error <= largest * 2.0**-16).all()) and float((error / largest).max()) == 2.0**-16
    near = (of_blocks - scales <= 14).reshape(E, 256, 12)[:, :200, : K // 32].repeat_interleave(32, dim=2)
    assert not bool(error[near].any()) and 0 < int(near.sum()) < near.numel()
    halves = found / (largest * 2.0**-15)
    assert bool(near.any()) and not bool(near.all())
    assert torch.equal(halves[~near], (want / (largest * 2.0**-15))[~near].round())  # half to even


def test_every_scale_and_nan() -> None:
    """Scales of one group, with all others 0, in blocks of their own; NaN is of 32 columns of one row."""
    data, scales = torch.zeros(256, 8, 64, dtype=torch.uint8), torch.full((256, 8, 4), 254, dtype=torch.uint8)
    data[:, :, 16:32] = torch.arange(16).to(torch.uint8) * 17
    scales[:, :, 1] = torch.arange(256)[:, None]
    w = Mxfp4(data, scales)
    packed = pack_mxfp4(w)
    found, want = wide(packed), of_mxfp4(w)
    assert torch.equal(found[:255], want[:255])
    assert bool(found[255, :, 32:64].isnan().all()) and not bool(found[255, :, 64:].any())
    factors = packed_mxfp4.unpack(packed).scales
    assert bool((factors >= 2.0**-126).all()) and float(factors.max()) == 2.0**121
    # One NaN beside other groups and rows of its block.
    one = weights(3, (1, 136, 256))
    changed = Mxfp4(one.data, one.scales.clone())
    changed.scales[0, 7, 5] = 255
    found, before = wide(pack_mxfp4(changed)), wide(pack_mxfp4(one))
    is_nan = torch.zeros_like(found, dtype=torch.bool)
    is_nan[0, 7, 160:192] = True
    assert torch.equal(found.isnan(), is_nan) and torch.equal(found[~is_nan], before[~is_nan])


@pytest.mark.parametrize("activation", [None, "swiglu", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_have_the_bits_of_fp8(activation: Any, interleaved: bool) -> None:
    shape = (E, 128, K)
    w, x = pack_mxfp4(weights(3, shape)), inputs(4, 20, K)
    counts, bias = torch.tensor((7, 0, 11), dtype=torch.int32), torch.randn(E, 128)
    how: dict[str, Any] = {"activation": activation, "interleaved": interleaved, "bias": bias}
    out = grouped_gemm(x, w, counts, **how)
    assert torch.equal(out[:18], grouped_gemm(x, packed_mxfp4.unpack(w, K), counts, **how)[:18])
    assert torch.equal(out[:18], grouped_gemm(tuple(x), tuple(w), counts, **how)[:18])
    if activation is not None:
        cast = grouped_gemm(x, w, counts, **how, quantize="fp8")
        same = grouped_gemm(x, packed_mxfp4.unpack(w, K), counts, **how, quantize="fp8")
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
        of_fp8 = {name: packed_mxfp4.unpack(call[name], K) for name, K in (("w13", 96), ("w2", 64))}
        outs.append(buffer.moe(**call | of_fp8))
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
