"""Buffer.moe with quantized weights on CPU ranks: the bits of its parts, or of widened weights; what it refuses.

tests/test_moe.py compares layers of plain and of FP8 weights with float64.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from moecomm import ops
from moecomm.dispatch.reference import quantize
from moecomm.errors import BadInput, Mismatch, Unsupported
from moecomm.fused import (
    Fp8,
    Int8,
    Mxfp4,
    Nvfp4,
    channels,
    grouped_gemm,
    interleave,
    pack_mxfp4,
    quantize_channels,
    quantize_rows,
    quantize_weights,
)
from moecomm.fused.experts import multiply_by_torch, say_once
from moecomm.fused.fp4 import dequantize
from moecomm.fused.kernels import FP8
from moecomm.testing import LayerCase, LocalBuffers, bounds, random_layer

from .test_moe import FP8_SIZES, opened

CHANNELS = {"hidden": 144, "intermediate": 48, "num_experts": 8, "topk": 3, "max_tokens": 33}
MXFP4 = {"hidden": 96, "intermediate": 64, "num_experts": 4, "topk": 2, "max_tokens": 33}
NVFP4 = {"hidden": 80, "intermediate": 48, "num_experts": 4, "topk": 2, "max_tokens": 33}
SIZES: dict[str, Any] = {"ranks": 4, **CHANNELS}
ALONE = SIZES | {"ranks": 1}
KINDS = [FP8, torch.int8]


def by_channel(case: LayerCase, rank: int, kind: torch.dtype) -> dict[str, Any]:
    call = case.call(rank)
    return call | {name: quantize_channels(call[name], kind) for name in ("w13", "w2")}


def wanted(case: LayerCase, kind: torch.dtype, rank: int) -> torch.Tensor:
    """Every token by itself, from casts and products of one row."""
    w13, w2 = (quantize_channels(w, kind) for w in (case.w13, case.w2))  # the order of channels changes no cast
    x, ids, weights = case.x[rank], case.topk_idx[rank].long(), case.topk_weights[rank]
    total = torch.zeros(x.shape)
    if case.bias[rank] is not None:
        total += case.bias[rank].float()
    for token, k in (ids >= 0).nonzero().tolist():
        expert, row = int(ids[token, k]), quantize_rows(x[token : token + 1], kind)
        both = (row.data.double() @ w13.data[expert].double().T) * (row.scales * w13.scales[expert]).double()
        if case.w13_bias is not None:
            both = both + case.w13_bias[expert].double()
        inner = quantize_rows(case.activation.apply(*both.chunk(2, dim=1)).to(x.dtype), kind)
        y = (inner.data.double() @ w2.data[expert].double().T) * (inner.scales * w2.scales[expert]).double()
        if case.w2_bias is not None:
            y = y + case.w2_bias[expert].double()
        total[token] += (1.0 if weights is None else weights[token, k]) * y[0].to(x.dtype).float()
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("domain_ranks", [4, 2])
def test_layers_by_channel_are_those_of_each_token(kind: torch.dtype, dtype: torch.dtype, domain_ranks: int) -> None:
    with opened(SIZES, dtype, domain_ranks=domain_ranks) as ranks:
        for seed in range(4):
            case = random_layer(seed, **SIZES, dtype=dtype, experts=seed > 1)
            for rank, out in enumerate(ranks.moe([by_channel(case, rank, kind) for rank in range(4)])):
                want = wanted(case, kind, rank)
                if len(want) == 0:
                    continue
                # A value next to the middle of two of FP8's may be cast to either, after sums in another order.
                torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05 * max(1.0, float(want.abs().max())))
                assert float((out.float() - want).norm()) <= 0.01 * float(want.norm()) + 1e-6, (seed, rank)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_layer_of_fp8_has_the_bits_of_its_parts(interleaved: bool) -> None:
    case = random_layer(3, **FP8_SIZES[0], dtype=torch.bfloat16)
    call = case.call(0)
    w13 = interleave(case.w13) if interleaved else case.w13
    call |= {"w13": quantize_weights(w13), "w2": quantize_weights(case.w2), "interleaved": interleaved, "bias": None}
    with opened(FP8_SIZES[0]) as ranks:
        (buffer,) = ranks.buffers
        out = buffer.moe(**call | {"w13": tuple(call["w13"])})
        routed = buffer.dispatch(call["x"], call["topk_idx"], call["topk_weights"], quantize="fp8")
        rows, counts = Fp8(routed.x, routed.scales), routed.tokens_per_expert
        inner = grouped_gemm(rows, call["w13"], counts, activation="swiglu", interleaved=interleaved)
        y = grouped_gemm(Fp8(*quantize(inner)), call["w2"], counts)
        assert torch.equal(out, buffer.combine(y, routed.handle, wire=call["wire"]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_by_channel_has_the_bits_of_its_parts(kind: torch.dtype) -> None:
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    case.bias, case.wire = [None], None
    call = by_channel(case, 0, kind)
    with opened(ALONE) as ranks:
        (buffer,) = ranks.buffers
        out = buffer.moe(**call | {name: tuple(call[name]) for name in ("w13", "w2")})
        assert torch.equal(out, ops.moe(buffer, **call))
        data, scales = quantize_rows(call["x"], kind)
        routed = buffer.dispatch(data.view(FP8), call["topk_idx"], call["topk_weights"], scales=scales)
        rows, counts = type(call["w2"])(routed.x.view(kind), routed.scales), routed.tokens_per_expert
        inner = grouped_gemm(rows, call["w13"], counts, activation="swiglu", interleaved=call["interleaved"])
        y = grouped_gemm(quantize_rows(inner, kind), call["w2"], counts)
        assert torch.equal(out, buffer.combine(y, routed.handle, wire="exact"))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_matrices_are_those_of_every_channel(kind: torch.dtype) -> None:
    call = by_channel(random_layer(3, **ALONE, dtype=torch.bfloat16), 0, kind)
    of = torch.rand(8, generator=torch.Generator().manual_seed(0))
    outs = []
    with opened(ALONE) as ranks:
        for scales in (of, of[:, None], None):
            weights = {
                name: type(call[name])(
                    call[name].data, of[:, None].expand(call[name].scales.shape) if scales is None else scales
                )
                for name in ("w13", "w2")
            }
            outs += ranks.moe([call | weights])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def mxfp4(seed: int, rows: int, columns: int) -> Mxfp4:
    """Weights of about 1 / sqrt(columns) of 4 experts."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (4, rows, columns // 2), generator=g)
    scales = torch.randint(120, 125, (4, rows, columns // 32), generator=g)
    return Mxfp4(data.to(torch.uint8), scales.to(torch.uint8))


def nvfp4(seed: int, rows: int, columns: int, *factors: int) -> Nvfp4:
    """Weights of about 1 / sqrt(columns) of 4 experts."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (4, rows, columns // 2), generator=g).to(torch.uint8)
    scales = (0.5 + torch.rand(4, rows, columns // 16, generator=g)).to(torch.float8_e4m3fn)
    return Nvfp4(data, scales, 0.03 + 0.03 * torch.rand(4, *factors, generator=g))


# By name: sizes, w13 and w2 of a seed, and how they are passed.
WIDENED: dict[str, tuple[dict[str, int], Callable[[int], tuple[Any, Any]], Callable[[Any], Any]]] = {
    "mxfp4": (MXFP4, lambda seed: (mxfp4(seed, 128, 96), mxfp4(seed + 1, 96, 64)), lambda w: w),
    "mxfp4, exponents": (
        MXFP4,
        lambda seed: (mxfp4(seed, 128, 96), mxfp4(seed + 1, 96, 64)),
        lambda w: (w[0], w[1].view(torch.float8_e8m0fnu)),
    ),
    "nvfp4": (NVFP4, lambda seed: (nvfp4(seed, 96, 80), nvfp4(seed + 1, 80, 48)), lambda w: w),
    "nvfp4, factors [E, 1]": (NVFP4, lambda seed: (nvfp4(seed, 96, 80, 1), nvfp4(seed + 1, 80, 48)), lambda w: w),
    "nvfp4, factors of rows": (NVFP4, lambda seed: (nvfp4(seed, 96, 80, 96), nvfp4(seed + 1, 80, 48)), tuple),
}


@pytest.mark.parametrize("name", WIDENED)
def test_a_layer_has_the_bits_of_one_with_the_weights_that_they_stand_for(name: str) -> None:
    sizes, draw, passed = WIDENED[name]
    drawn = set()
    with opened({"ranks": 2, **sizes}) as ranks:
        for seed in range(6):
            case = random_layer(seed, ranks=2, **sizes, dtype=torch.bfloat16, experts=True)
            drawn.add(case.activation.name)
            w13, w2 = draw(seed)
            case.w13, case.w2, case.interleaved = dequantize(w13), dequantize(w2), False
            calls = [case.call(rank) for rank in range(2)]
            own = [slice(0, 2), slice(2, 4)]
            given = [
                call | {key: passed(type(w)(*(part[mine] for part in w))) for key, w in (("w13", w13), ("w2", w2))}
                for call, mine in zip(calls, own, strict=True)
            ]
            wide = ranks.moe(calls)
            for _ in range(2):  # a layer that is known, too
                for rank, (out, want) in enumerate(zip(ranks.moe(given), wide, strict=True)):
                    case.check(rank, out)
                    assert torch.equal(out, want)
    assert {"swiglu", "swigluoai"} <= drawn


def test_on_cpus_rows_travel_before_and_after_the_experts(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    sizes = FP8_SIZES[0] | {"ranks": 2}
    case = random_layer(3, **sizes, dtype=torch.bfloat16, fp8=True)
    with opened(sizes) as ranks:
        calls = [case.call(rank) for rank in range(2)]
        outs = ranks.moe([{**call, "fused": True} for call in calls])
        assert all(map(torch.equal, outs, ranks.moe([{**call, "fused": False} for call in calls])))
    assert ["runs unfused" in record.getMessage() for record in caplog.records] == [True]


def test_torch_computes_what_the_reference_does() -> None:
    """As on GPUs for which there is no kernel; it rounds sums before their scales."""
    case = random_layer(4, **ALONE, dtype=torch.bfloat16, experts=True)
    for kind in KINDS:
        call = by_channel(case, 0, kind)
        x = torch.randn(40, 144, generator=torch.Generator().manual_seed(0)).bfloat16()
        rows, counts = quantize_rows(x, kind), torch.tensor([3, 0, 9, 4, 0, 0, 20, 4], dtype=torch.int32)
        bias = torch.rand(8, 96)
        got = multiply_by_torch(rows, call["w13"], counts, torch.bfloat16, False, case.activation, bias)
        about = {**case.activation.arguments(), "bias": bias, "interleaved": False}
        want = grouped_gemm(rows, call["w13"], counts, **about)
        torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-5)


def test_what_is_not_fused_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    say_once.cache_clear()
    call = by_channel(random_layer(3, **ALONE, dtype=torch.bfloat16), 0, FP8)
    monkeypatch.setattr(type(channels.CHANNELS), "lacks_kernel", lambda *about: "this test says so")
    with opened(ALONE) as ranks:
        for _ in range(2):
            ranks.moe([call | {"fused": True}])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "this test says so" in said[0] and "runs unfused" in said[1]
    say_once.cache_clear()


def test_ranks_of_which_one_has_packed_weights_are_named() -> None:
    """Rows travel in FP8 to packed weights, in bfloat16 to those that are not."""
    sizes = MXFP4 | {"ranks": 2}
    case = random_layer(3, **sizes, dtype=torch.bfloat16)
    case.interleaved = False
    plain = mxfp4(1, 128, 96), mxfp4(2, 96, 64)
    weights = [tuple(type(w)(*(t[:2] for t in w)) for w in both) for both in (map(pack_mxfp4, plain), plain)]
    calls = [case.call(rank) | {"w13": w13, "w2": w2} for rank, (w13, w2) in enumerate(weights)]
    with opened(sizes) as ranks, ThreadPoolExecutor(2) as pool:
        pairs = zip(ranks.buffers, calls, strict=True)
        for future in [pool.submit(buffer.moe, **call) for buffer, call in pairs]:
            with pytest.raises(Mismatch):
                future.result()


@pytest.mark.parametrize("other", ["blocks", "INT8", "bf16"])
def test_ranks_with_weights_of_other_formats_are_named(other: str) -> None:
    sizes = SIZES | {"ranks": 2, "intermediate": 64}
    case = random_layer(3, **sizes, dtype=torch.bfloat16)
    mine, plain = by_channel(case, 0, FP8), case.call(1)
    if other != "bf16":
        cast = quantize_weights if other == "blocks" else lambda w: quantize_channels(w, torch.int8)
        plain |= {name: cast(plain[name]) for name in ("w13", "w2")}
    with opened(sizes) as ranks, ThreadPoolExecutor(2) as pool:
        pairs = zip(ranks.buffers, (mine, plain), strict=True)
        for future in [pool.submit(buffer.moe, **call) for buffer, call in pairs]:
            with pytest.raises(Mismatch):
                future.result()


def by_column(w: torch.Tensor) -> torch.Tensor:
    return w.transpose(1, 2).contiguous().transpose(1, 2)


class Refusal(NamedTuple):
    """Weights of one format that a layer refuses."""

    sizes: dict[str, Any]
    good: Callable[[LayerCase], tuple[Any, Any]]  # w13 and w2
    bad: Callable[[LayerCase, Any, Any], list[dict[str, Any]]]  # BadInput names the argument
    narrow: Callable[[LayerCase, Any, Any], dict[str, Any]]
    multiple: int  # of which `narrow` has no columns
    dtype: torch.dtype  # of rows that do not go with the weights


REFUSALS = {
    "fp8": Refusal(
        FP8_SIZES[0],
        lambda case: (quantize_weights(case.w13), quantize_weights(case.w2)),
        lambda case, w13, w2: [
            {"w13": case.w13},
            {"w2": case.w2},
            {"w2": (*w2, *w2)},
            {"w2": (w2.data, "scales")},
            {"w2": (w2.data.float(), w2.scales)},
            {"w2": (w2.data, w2.scales.double())},
            {"w2": (w2.data, torch.ones(4, 2, 1))},
            {"w13": (w13.data[:, :-2].contiguous(), w13.scales)},
            {"w13": (w13.data, w13.scales[:, :, :0])},
            {"w13": (by_column(w13.data), w13.scales)},
        ],
        lambda case, w13, w2: {"w13": quantize_weights(case.w13[:, :32]), "w2": quantize_weights(case.w2[:, :, :16])},
        32,
        torch.float32,
    ),
    "channels": Refusal(
        ALONE,
        lambda case: (quantize_channels(case.w13), quantize_channels(case.w2)),
        lambda case, w13, w2: [
            {"w13": case.w13},
            {"w13": quantize_weights(case.w13)},
            {"w13": quantize_channels(case.w13, torch.int8)},
            {"w13": Fp8(w13.data, w13.scales[:, :7])},
            {"w13": Fp8(w13.data, w13.scales.double())},
            {"w13": Fp8(w13.data[:, :-2].contiguous(), w13.scales[:, :-2])},
            {"w13": Fp8(by_column(w13.data), w13.scales)},
            {"w2": Fp8(w2.data, torch.ones(3))},
            {"w2": Int8(torch.zeros(w2.data.shape, dtype=torch.int8), w2.scales)},
        ],
        lambda case, w13, w2: {"w13": quantize_channels(case.w13[:, :16]), "w2": quantize_channels(case.w2[:, :, :8])},
        16,
        torch.float32,
    ),
    "mxfp4": Refusal(
        MXFP4,
        lambda case: (mxfp4(1, 128, 96), mxfp4(2, 96, 64)),
        lambda case, w13, w2: [
            {"w13": case.w13},
            {"w2": case.w2},
            {"w2": Fp8(torch.zeros(4, 96, 64).to(FP8), torch.ones(4, 96))},
            {"w13": (w13.data[:, :-2], w13.scales)},
            {"w13": (torch.cat((w13.data, w13.data), 2)[:, :, :48], w13.scales)},  # with gaps
            {"w13": (w13.data, w13.scales[:, :, :-1])},
            {"w2": (w2.data, w2.scales.int())},
            {"w2": (w2.data[:3], w2.scales[:3])},
        ],
        lambda case, w13, w2: {"w2": (w2.data[:, :, :24].contiguous(), w2.scales)},
        32,
        torch.float16,
    ),
    "packed mxfp4": Refusal(
        MXFP4,
        lambda case: (pack_mxfp4(mxfp4(1, 128, 96)), pack_mxfp4(mxfp4(2, 96, 64))),
        lambda case, w13, w2: [
            {"w13": case.w13},
            {"w2": case.w2},
            {"w2": quantize_weights(case.w2)},
            {"w13": mxfp4(1, 128, 96)},
            {"w13": (w13.data[:, :-1].contiguous(), w13.scales[:, :, :-1].contiguous())},
            {"w13": (w13.data, w13.scales[:, :, :-1])},
            {"w13": (w13.data[:, :, :-1].contiguous(), w13.scales)},
            {"w13": (w13.data, w13.scales.transpose(1, 2))},
            {"w13": (by_column(w13.data), w13.scales)},
            {"w2": (w2.data, w2.scales.long())},
            {"w2": (w2.data, w2.scales, w2.scales)},
            {"w2": (w2.data[:3], w2.scales[:3])},
        ],
        lambda case, w13, w2: {"w13": pack_mxfp4(mxfp4(1, 96, 96))},
        32,
        torch.float32,
    ),
    "nvfp4": Refusal(
        NVFP4,
        lambda case: (nvfp4(1, 96, 80), nvfp4(2, 80, 48)),
        lambda case, w13, w2: [
            {"w13": case.w13},
            {"w2": case.w2},
            {"w2": (w2.data, torch.zeros(4, 80, 3, dtype=torch.uint8))},  # MXFP4
            {"w13": (*w13, w13.factors)},
            {"w13": w13._replace(scales=w13.scales[:, :, :-1])},
            {"w2": w2._replace(scales=w2.scales.view(torch.uint8))},
            {"w2": w2._replace(factors=w2.factors.double())},
            {"w13": w13._replace(factors=w13.factors[:3])},
            {"w2": w2._replace(data=w2.data[:3])},
        ],
        lambda case, w13, w2: {"w2": w2._replace(data=w2.data[:, :, :20].contiguous())},
        16,
        torch.float16,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_named_before_a_row_is_sent(name: str) -> None:
    refusal = REFUSALS[name]
    sizes = refusal.sizes | {"ranks": 1}
    case = random_layer(3, **sizes, dtype=torch.bfloat16)
    case.interleaved = False
    w13, w2 = refusal.good(case)
    good = case.call(0) | {"w13": w13, "w2": w2}
    with opened(sizes) as ranks:
        (buffer,) = ranks.buffers
        for change in refusal.bad(case, w13, w2):
            for call in (buffer.moe, lambda **given: ops.moe(buffer, **given)):
                with pytest.raises(BadInput) as caught:
                    call(**good | change)
                assert caught.value.argument in change or caught.value.got == "another format", caught.value
        with pytest.raises(Unsupported, match=f"multiple of {refusal.multiple}"):
            buffer.moe(**good | refusal.narrow(case, w13, w2))
        assert buffer.rounds.turn.made == 0
        with pytest.raises(Unsupported, match="quantized"):
            ops.moe(buffer, **good | {"x": good["x"].clone().requires_grad_()})
        assert torch.equal(buffer.moe(**good), ops.moe(buffer, **good))
    words = "float32" if refusal.dtype is torch.float32 else "bfloat16"
    with opened(sizes, refusal.dtype) as ranks, pytest.raises(Unsupported, match=words):
        ranks.buffers[0].moe(**good | {"x": good["x"].to(refusal.dtype), "bias": None})


# Values of four bits with scales of 32 columns, as compressed-tensors and others have them.
INT4: dict[str, Callable[[int, int], tuple[torch.Tensor, ...]]] = {
    "words": lambda n, k: (torch.zeros(4, n, k // 8, dtype=torch.int32), torch.ones(4, n, k // 32).bfloat16()),
    "bytes": lambda n, k: (torch.zeros(4, n, k // 2, dtype=torch.uint8), torch.ones(4, n, k // 32).half()),
    "signed bytes": lambda n, k: (torch.zeros(4, n, k // 2, dtype=torch.int8), torch.ones(4, n, k // 32)),
    "zero points": lambda n, k: (*INT4["bytes"](n, k), torch.zeros(4, n, k // 32)),
}


@pytest.mark.parametrize("kind", INT4)
def test_int4_is_a_format_that_is_not_taken(kind: str) -> None:
    case = random_layer(3, **MXFP4 | {"ranks": 1}, dtype=torch.bfloat16)
    w13, w2 = INT4[kind](128, 96), INT4[kind](96, 64)
    call = case.call(0) | {"w13": w13, "w2": w2}
    with opened(MXFP4 | {"ranks": 1}) as ranks:
        (buffer,) = ranks.buffers
        for run in (buffer.moe, lambda **given: ops.moe(buffer, **given)):
            with pytest.raises(BadInput, match=r"w13: got torch\.\w+ values with scales of .* INT4, .* are not"):
                run(**call)
    if kind != "signed bytes":
        with pytest.raises(BadInput, match=r"w: got .* INT4, .* are not"):
            grouped_gemm(torch.zeros(4, 96).bfloat16(), w13, torch.ones(4, dtype=torch.int32))


def test_fp8_rows_have_at_least_16_columns() -> None:
    sizes = FP8_SIZES[0] | {"ranks": 1, "hidden": 8}
    case = random_layer(3, **sizes, dtype=torch.bfloat16, fp8=True)
    with opened(sizes) as ranks, pytest.raises(Unsupported, match="H = 8"):
        ranks.buffers[0].moe(**case.call(0) | {"bias": None})


def drawn_blocks(intermediate: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down of 4 experts; gate is much smaller than up, so that another's scale is far off."""
    g = torch.Generator().manual_seed(intermediate)
    sizes = ((intermediate, 256, 0.05), (intermediate, 256, 0.5), (256, intermediate, 0.1))
    gate, up, down = (torch.randn(4, rows, columns, generator=g) * by for rows, columns, by in sizes)
    return gate, up, down


def zeros_behind(data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype)


def layer_in_float64(x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The sum of each token's experts, of exact weights; rows are cast to FP8 before both products."""
    rows, out = bounds.in_float64(Fp8(*quantize(x)), 1), torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(4):
        gate, up = (rows @ w13[expert].T).chunk(2, dim=1)
        inner = bounds.in_float64(Fp8(*quantize((torch.nn.functional.silu(gate) * up).bfloat16())), 1)
        out += inner @ w2[expert].T * (ids == expert).sum(dim=1, keepdim=True)
    return out


@pytest.mark.parametrize("intermediate", [64, 96, 128, 160, 192, 224, 256, 352])
def test_scales_of_gate_and_up_are_told_apart_from_those_of_both(intermediate: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(16, 256, generator=g).bfloat16(), torch.rand(16, 4, generator=g).topk(2).indices
    rows, counts = Fp8(*quantize(x)), torch.tensor([4, 4, 4, 4], dtype=torch.int32)
    gate, up, down = drawn_blocks(intermediate)
    w13, w2 = quantize_weights(torch.cat((gate, up), dim=1)), quantize_weights(down)
    halves = [quantize_weights(w) for w in (gate, up)]
    data, of_halves = torch.cat([w.data for w in halves], dim=1), torch.stack([w.scales for w in halves], dim=1)
    lacking = -intermediate % 128
    filled = torch.cat([zeros_behind(w.data, lacking, 0) for w in halves], dim=1)
    with LocalBuffers(1, hidden=256, num_experts=4, topk=2, max_tokens=16) as ranks:
        (buffer,) = ranks.buffers

        def calls(w13: Any, w2: Any) -> list[Callable[[], Any]]:
            return [
                lambda: buffer.moe(x, ids, None, w13, w2),
                lambda: ops.moe(buffer, x, ids, None, w13, w2),
                lambda: grouped_gemm(rows, w13, counts, activation="swiglu", interleaved=False),
            ]

        def check(of_w13: list[Any], of_w2: Any, values: torch.Tensor) -> None:
            """Both forms of scales have the bits of each other, and the values of float64."""
            want = layer_in_float64(x, ids, values, bounds.in_float64(w2, 128))
            results = [[call() for call in calls(w13, of_w2)] for w13 in of_w13]
            for out, of_operator, inner in results:
                assert float((out - want).norm()) <= 0.01 * float(want.norm())
                assert torch.equal(out, of_operator) and torch.equal(out, results[0][0])
                assert torch.equal(inner, results[0][2])

        def refused(scales: torch.Tensor, error: type[Exception], match: str) -> None:
            for call in calls((data, scales), w2):
                with pytest.raises(error, match=match):
                    call()

        both = [w13._replace(scales=w13.scales.unsqueeze(1))]
        if lacking == 0 or lacking >= 64:  # two grids of blocks have another shape, or are one
            both.append(w13)
        check(both, w2, bounds.in_float64(w13, 128))
        of_filled = [(filled, of_halves), (filled, of_halves.flatten(1, 2))]
        exact = torch.cat([bounds.in_float64(w, 128) for w in halves], dim=1)
        check(of_filled, (zeros_behind(w2.data, 0, lacking), w2.scales), exact)
        if lacking:
            refused(of_halves, Unsupported, f"I = {intermediate} is no multiple of 128: append {lacking} rows")
        if 0 < lacking < 64:
            for scales in (w13.scales, of_halves.flatten(1, 2)):
                refused(
                    scales, BadInput, r"scales\.unsqueeze\(1\) if gate and up were quantized as one matrix, scales\.unf"
                )
        elif lacking:
            refused(of_halves.flatten(1, 2), Unsupported, "is no multiple of 128")
        for scales in (of_halves.unsqueeze(1), of_halves[:, :, :0], w13.scales[:, None, :0]):
            refused(scales, BadInput, "scales|shape")
