"""Buffer.moe with weights that have scales of channels, FP8 and INT8, on CPU ranks: the bits of its parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moecomm import ops
from moecomm.errors import BadInput, Mismatch, Unsupported
from moecomm.fused import (
    Fp8,
    Int8,
    grouped_gemm,
    quantize_channels,
    quantize_rows,
    quantize_weights,
)
from moecomm.fused.channels import CHANNELS
from moecomm.fused.experts import multiply_by_torch, say_once
from moecomm.fused.kernels import FP8
from moecomm.testing import LayerCase, LocalBuffers, random_layer

SIZES: dict[str, Any] = {
    "ranks": 4,
    "hidden": 144,
    "intermediate": 48,
    "num_experts": 8,
    "topk": 3,
    "max_tokens": 33,
}
ALONE = SIZES | {"ranks": 1}
KINDS = [FP8, torch.int8]


def opened(sizes: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any) -> LocalBuffers:
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    return LocalBuffers(**of_buffer, dtype=dtype, backend="host", timeout_s=20, **more)


def call_of(case: LayerCase, rank: int, kind: torch.dtype) -> dict[str, Any]:
    call = case.call(rank)
    return call | {name: quantize_channels(call[name], kind) for name in ("w13", "w2")}


def wanted(case: LayerCase, kind: torch.dtype, rank: int) -> torch.Tensor:
    """Every token by itself, from casts and products of one row."""
    matrices = case.w13, case.w2
    all_w13, all_w2 = (quantize_channels(w, kind) for w in matrices)  # the order of channels changes no cast
    x, ids, weights = case.x[rank], case.topk_idx[rank].long(), case.topk_weights[rank]
    total = torch.zeros(x.shape)
    if case.bias[rank] is not None:
        total += case.bias[rank].float()
    for token, experts in enumerate(ids.tolist()):
        for k, expert in enumerate(experts):
            if expert < 0:
                continue
            row, w13, w2 = quantize_rows(x[token : token + 1], kind), all_w13, all_w2
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
def test_layers_are_those_of_each_token(kind: torch.dtype, dtype: torch.dtype, domain_ranks: int) -> None:
    with opened(SIZES, dtype, domain_ranks=domain_ranks) as ranks:
        for seed in range(4):
            case = random_layer(seed, **SIZES, dtype=dtype, experts=seed > 1)
            outs = ranks.moe([call_of(case, rank, kind) for rank in range(4)])
            for rank, out in enumerate(outs):
                want = wanted(case, kind, rank)
                if len(want) == 0:
                    continue
                # A value next to the middle of two of FP8's may be cast to either, after sums in another order.
                torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05 * max(1.0, float(want.abs().max())))
                assert float((out.float() - want).norm()) <= 0.01 * float(want.norm()) + 1e-6, (seed, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_the_method_has_the_bits_of_its_parts(kind: torch.dtype) -> None:
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    case.bias, case.wire = [None], None
    call = call_of(case, 0, kind)
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
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    call = call_of(case, 0, kind)
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


def test_torch_computes_what_the_reference_does() -> None:
    """As on GPUs for which there is no kernel; it rounds sums before their scales."""
    case = random_layer(4, **ALONE, dtype=torch.bfloat16, experts=True)
    for kind in KINDS:
        call = call_of(case, 0, kind)
        x = torch.randn(40, 144, generator=torch.Generator().manual_seed(0)).bfloat16()
        rows, counts = quantize_rows(x, kind), torch.tensor([3, 0, 9, 4, 0, 0, 20, 4], dtype=torch.int32)
        bias = torch.rand(8, 96)
        got = multiply_by_torch(rows, call["w13"], counts, torch.bfloat16, False, case.activation, bias)
        about = {"activation": case.activation.name, "bias": bias, "interleaved": False}
        if case.activation.name == "swigluoai":
            about["activation_limit"] = case.activation.limit
        want = grouped_gemm(rows, call["w13"], counts, **about)
        torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-5)


def test_what_is_not_fused_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    say_once.cache_clear()
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    call = call_of(case, 0, FP8)
    monkeypatch.setattr(type(CHANNELS), "lacks_kernel", lambda *about: "this test says so")
    with opened(ALONE) as ranks:
        for _ in range(2):
            ranks.moe([call | {"fused": True}])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "this test says so" in said[0] and "runs unfused" in said[1]
    say_once.cache_clear()


@pytest.mark.parametrize("other", ["blocks", "INT8", "bf16"])
def test_ranks_with_weights_of_other_formats_are_named(other: str) -> None:
    sizes = SIZES | {"ranks": 2, "intermediate": 64}
    case = random_layer(3, **sizes, dtype=torch.bfloat16)
    calls = [call_of(case, rank, FP8) for rank in range(2)]
    plain = case.call(1)
    if other != "bf16":
        cast = quantize_weights if other == "blocks" else lambda w: quantize_channels(w, torch.int8)
        plain |= {name: cast(plain[name]) for name in ("w13", "w2")}
    with opened(sizes) as ranks, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(buffer.moe, **call) for buffer, call in zip(ranks.buffers, (calls[0], plain), strict=True)
        ]
        for future in futures:
            with pytest.raises(Mismatch):
                future.result()


def test_what_does_not_fit_is_named_before_a_row_is_sent() -> None:
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    case.interleaved, good = False, call_of(random_layer(3, **ALONE, dtype=torch.bfloat16), 0, FP8)
    good["interleaved"], w13, w2 = False, good["w13"], good["w2"]
    refused: list[dict[str, Any]] = [
        {"w13": case.w13},
        {"w13": quantize_weights(case.w13)},
        {"w13": quantize_channels(case.w13, torch.int8)},
        {"w13": Fp8(w13.data, w13.scales[:, :7])},
        {"w13": Fp8(w13.data, w13.scales.double())},
        {"w13": Fp8(w13.data[:, :-2].contiguous(), w13.scales[:, :-2])},
        {"w13": Fp8(w13.data.transpose(1, 2).contiguous().transpose(1, 2), w13.scales)},
        {"w2": Fp8(w2.data, torch.ones(3))},
        {"w2": Int8(torch.zeros(w2.data.shape, dtype=torch.int8), w2.scales)},
    ]
    with opened(ALONE) as ranks:
        (buffer,) = ranks.buffers
        for change in refused:
            with pytest.raises(BadInput) as caught:
                buffer.moe(**good | change)
            assert caught.value.argument in ("w13", "w2"), change
        narrow = {"w13": quantize_channels(case.w13[:, :16]), "w2": quantize_channels(case.w2[:, :, :8])}
        with pytest.raises(Unsupported, match="multiple of 16"):
            buffer.moe(**good | narrow)
        with pytest.raises(Unsupported, match="quantized"):
            ops.moe(buffer, **good | {"x": good["x"].clone().requires_grad_()})
        assert buffer.moe(**good).isfinite().all()
    with opened(ALONE, torch.float32) as ranks, pytest.raises(Unsupported, match="float32"):
        ranks.buffers[0].moe(**good | {"x": good["x"].float(), "bias": None})
