"""Buffer.moe with weights in FP8 on CPU ranks, against float64; the bits of its parts; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecomm.dispatch.reference import quantize
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import Fp8, experts, grouped_gemm, interleave, quantize_weights
from moecomm.testing import LocalBuffers, random_layer
from moecomm.testing.layers import expected

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 2, "hidden": 16, "intermediate": 96, "num_experts": 2, "topk": 1, "max_tokens": 17},
    {"ranks": 3, "hidden": 272, "intermediate": 160, "num_experts": 12, "topk": 3, "max_tokens": 9},
    {"ranks": 4, "hidden": 144, "intermediate": 64, "num_experts": 16, "topk": 8, "max_tokens": 33},
]
ALONE, PAIR = SIZES[0], SIZES[0] | {"ranks": 2}
CASES = 10  # of each of SIZES and dtypes


def opened(sizes: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any) -> LocalBuffers:
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    return LocalBuffers(**of_buffer, dtype=dtype, backend="host", timeout_s=20, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}")
def test_random_layers_are_those_of_float64(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in range(CASES):
            case = random_layer(seed, **sizes, dtype=dtype, fp8=True)
            calls = [case.call(rank) for rank in range(sizes["ranks"])]
            for rank, (out, again) in enumerate(zip(ranks.moe(calls), ranks.moe(calls), strict=True)):
                case.check(rank, out)
                assert torch.equal(out, again)


def test_several_domains() -> None:
    with opened(SIZES[3], domain_ranks=2) as ranks:
        for seed in range(3):
            case = random_layer(seed, **SIZES[3], dtype=torch.bfloat16, fp8=True)
            for rank, out in enumerate(ranks.moe([case.call(rank) for rank in range(4)])):
                case.check(rank, out)


@pytest.mark.parametrize("sizes", SIZES[2:], ids=lambda s: f"R{s['ranks']}-H{s['hidden']}")
def test_biases_and_activations_are_those_of_float64(sizes: dict[str, Any]) -> None:
    with opened(sizes) as ranks:
        for seed in range(2 * CASES):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=True, experts=True)
            for rank, out in enumerate(ranks.moe([case.call(rank) for rank in range(sizes["ranks"])])):
                case.check(rank, out)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_method_has_the_bits_of_its_parts(interleaved: bool) -> None:
    """An FP8 dispatch, the GEMMs, a combine; and experts token by token, from casts alone."""
    case = random_layer(3, **ALONE, dtype=torch.bfloat16)
    call = case.call(0)
    w13 = interleave(case.w13) if interleaved else case.w13
    call |= {"w13": quantize_weights(w13), "w2": quantize_weights(case.w2), "interleaved": interleaved, "bias": None}
    routing = {name: call[name] for name in ("topk_idx", "topk_weights")}
    with opened(ALONE) as ranks:
        (buffer,) = ranks.buffers
        out = buffer.moe(**call | {"w13": tuple(call["w13"])})
        routed = buffer.dispatch(call["x"], **routing, quantize="fp8")
        rows, counts = Fp8(routed.x, routed.scales), routed.tokens_per_expert
        gate = {"activation": "swiglu", "interleaved": interleaved}
        plain = grouped_gemm(rows, call["w13"], counts, **gate)
        y = grouped_gemm(Fp8(*quantize(plain)), call["w2"], counts)
        assert torch.equal(out, buffer.combine(y, routed.handle, wire=call["wire"]))


def test_on_cpus_rows_travel_before_and_after_the_experts(caplog: pytest.LogCaptureFixture) -> None:
    experts.say_once.cache_clear()
    case = random_layer(3, **PAIR, dtype=torch.bfloat16, fp8=True)
    with opened(PAIR) as ranks:
        calls = [case.call(rank) for rank in range(2)]
        outs = ranks.moe([{**call, "fused": True} for call in calls])
        assert all(map(torch.equal, outs, ranks.moe([{**call, "fused": False} for call in calls])))
    assert ["runs unfused" in record.getMessage() for record in caplog.records] == [True]


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "topk_idx": lambda call: call["topk_idx"].flip(1),
    "w2": lambda call: Fp8(call["w2"].data, call["w2"].scales * 1.5),
    "w13": lambda call: Fp8(
        call["w13"].data.view(torch.uint8).roll(32, dims=1).view(torch.float8_e4m3fn), call["w13"][1]
    ),
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_the_bound_sees_a_mistake(argument: str) -> None:
    right = next(
        case
        for case in (random_layer(seed, **ALONE, dtype=torch.bfloat16, fp8=True) for seed in range(1000))
        if len(case.x[0]) == 40 and case.topk_weights[0] is not None and len(case.topk_idx[0].unique()) == 4
    )
    right.interleaved = False
    call = right.call(0)
    call[argument] = MISTAKES[argument](call)
    with opened(ALONE) as ranks:
        (out,) = ranks.moe([call])
    want = expected(right, 0)
    assert bool(((out.double() - want.out).abs() > want.bound).any(dim=1).float().mean() > 0.9)


def test_what_does_not_fit_is_named_before_a_row_is_sent() -> None:
    case = random_layer(3, **PAIR, dtype=torch.bfloat16, fp8=True)
    case.interleaved = False
    good = [case.call(rank) for rank in range(2)]
    w13, w2 = good[0]["w13"], good[0]["w2"]
    refused: list[dict[str, Any]] = [
        {"w13": case.w13[:2]},
        {"w2": case.w2[:2]},
        {"w2": (*w2, *w2)},
        {"w2": (w2.data, "scales")},
        {"w2": (w2.data.float(), w2.scales)},
        {"w2": (w2.data, w2.scales.double())},
        {"w2": (w2.data, torch.ones(2, 2, 1))},
        {"w13": (w13.data[:, :-2].contiguous(), w13.scales)},
        {"w13": (w13.data, w13.scales[:, :, :0])},
        {"w13": (w13.data.transpose(1, 2).contiguous().transpose(1, 2), w13.scales)},
    ]
    narrow = {"w13": quantize_weights(case.w13[:2, :32]), "w2": quantize_weights(case.w2[:2, :, :16])}
    with opened(PAIR) as ranks:
        for change in refused:
            with pytest.raises(BadInput) as caught:
                ranks.buffers[0].moe(**good[0] | change)
            assert caught.value.argument in change, change
            ranks.buffers[1].rounds.count_rejected()  # as if the call had failed there as well: the ranks stay in step
        with pytest.raises(Unsupported, match="multiple of 32"):
            ranks.buffers[0].moe(**good[0] | narrow)
        ranks.buffers[1].rounds.count_rejected()
        for rank, out in enumerate(ranks.moe(good)):
            case.check(rank, out)
    with opened(PAIR, torch.float32) as ranks, pytest.raises(Unsupported, match="float32"):
        ranks.buffers[0].moe(**good[0] | {"x": good[0]["x"].float(), "bias": None})
    cut = {"w13": quantize_weights(case.w13[:2, :, :8]), "w2": quantize_weights(case.w2[:2, :8])}
    cut |= {"x": good[0]["x"][:, :8].contiguous(), "bias": None}
    with opened(PAIR | {"hidden": 8}) as ranks, pytest.raises(Unsupported, match="H = 8"):
        ranks.buffers[0].moe(**good[0] | cut)
