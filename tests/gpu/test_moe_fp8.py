"""Buffer.moe with weights in FP8 on GPUs, against float64: several ranks on one GPU, and one process a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.experts import most_experts
from moecomm.fused import FP8_SCHEDULES, PACKED_SCHEDULES, Fp8, choose_fp8, grouped_gemm, pack_mxfp4, schedules
from moecomm.fused.compute import layer_kernel, rows_per_counter
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel, publish_kernel
from moecomm.fused.packed_mxfp4 import unpack
from moecomm.gpu import plain_kernel, tuning
from moecomm.testing import LayerCase, random_layer

from ..conftest import GPU_COUNTS, Ranks
from ..fused.test_packed_mxfp4 import weights
from .layers import check_replays, checked, compile_all
from .test_moe import (
    FUSED,
    NAMES,
    calls_of,
    full_layer,
    layers_of_a_process,
    of_processes,
    one_or_other,
    opened,
    replayed,
    same_bits,
    seeds,
)

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 2, "hidden": 16, "intermediate": 96, "num_experts": 2, "topk": 1, "max_tokens": 17},
    {"ranks": 3, "hidden": 272, "intermediate": 160, "num_experts": 12, "topk": 3, "max_tokens": 90},
    {"ranks": 4, "hidden": 512, "intermediate": 128, "num_experts": 16, "topk": 8, "max_tokens": 520},
    {"ranks": 3, "hidden": 272, "intermediate": 160, "num_experts": 11, "topk": 3, "max_tokens": 90},
]
LARGE: dict[str, Any] = {  # several tiles of columns, groups of several hundred rows
    "ranks": 2,
    "hidden": 1024,
    "intermediate": 1056,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 1500,
}
PACKED = [SIZES[0], {**SIZES[4], "hidden": 288}, SIZES[3], LARGE]  # multiples of 32
# Seeds of layers of the first of them that have activations and biases.  Each takes kernels of its own.
DRAWN = (0, 5, 9)
PROCESSES = of_processes(SIZES, LARGE)
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile kernels that take long into the cache, on all cores."""
    if not torch.cuda.is_available():
        return
    kernels: set[plain_kernel.PlainKernel] = set()
    every = [*SIZES, LARGE, *PACKED, *(sizes for sizes, _ in PROCESSES.values())]
    for sizes, rows in itertools.product(every, (1, 1000)):
        hidden, inner = sizes["hidden"], sizes["intermediate"]
        local = most_experts(sizes["num_experts"], sizes["ranks"])
        first, second = (
            FP8_SCHEDULES[choose_fp8(rows, local, *shape)] for shape in ((2 * inner, hidden), (hidden, inner))
        )
        both, counted = schedules.schedule_of_both(FP8, rows, inner), rows_per_counter(rows * local)
        kernels |= {publish_kernel(dtype, FP8, hidden) for dtype in DTYPES}
        for packed in (False, True) if sizes in PACKED else (False,):
            if packed:
                first, second, both = map(schedules.packed_as, (first, second, both))
            kernels |= {gemm_kernel(FP8, True, apart, first, out=FP8) for apart in (False, True)}
            for dtype in DTYPES:
                kernels.add(gemm_kernel(FP8, False, False, second, out=dtype))
                kernels |= {layer_kernel(FP8, apart, both, hidden, dtype, counted) for apart in (False, True)}
    compile_all(kernels | drawn_kernels())


def drawn_kernels() -> set[plain_kernel.PlainKernel]:
    """Those of DRAWN: with FP8 weights, unfused, and with packed ones."""
    kernels: set[plain_kernel.PlainKernel] = set()
    sizes, dtype = PACKED[0], torch.bfloat16
    schedule = FP8_SCHEDULES["64x5c1"]  # of few rows
    for seed in DRAWN:
        case = drawn_layer(seed, sizes, dtype)
        name, apart = case.activation.kernel, not case.interleaved
        biases = [bias is not None for bias in (case.w13_bias, case.w2_bias)]
        for one in (schedule, schedules.packed_as(schedule)):
            kernels.add(gemm_kernel(FP8, True, apart, one, FP8, Epilogue(name, biases[0])))
            kernels.add(gemm_kernel(FP8, False, False, one, dtype, Epilogue(bias=biases[1])))
        packed = schedules.packed_as(schedule)
        kernels.add(layer_kernel(FP8, apart, packed, sizes["hidden"], dtype, epilogue=Epilogue(name, any(biases))))
    return kernels


def drawn_layer(seed: int, sizes: dict[str, Any], dtype: torch.dtype) -> LayerCase:
    of_experts = seed in DRAWN and sizes is PACKED[0] and dtype is torch.bfloat16
    case = random_layer(seed, **sizes, dtype=dtype, experts=of_experts)
    case.wire = None
    return case


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}")
def test_random_layers_of_virtual_ranks(
    sizes: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in seeds(request, 40):
            case = random_layer(seed, **sizes, dtype=dtype, fp8=True)
            calls = calls_of(case)
            for out, again in zip(checked(ranks, case, calls), ranks.moe(calls), strict=True):
                assert same_bits(out, again)


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [*SIZES, LARGE], ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}"
)
def test_fused_layers_have_the_bits_of_dispatch_and_combine(
    sizes: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in seeds(request, 75 if sizes is LARGE else 40):
            case = random_layer(seed, **sizes, dtype=dtype, fp8=True)
            case.wire = None
            calls = calls_of(case)
            outs = checked(ranks, case, one_or_other(calls, fused=True))
            for rank, (out, other) in enumerate(zip(outs, ranks.moe(one_or_other(calls, fused=False)), strict=True)):
                assert same_bits(out, other), f"layer of seed {seed}, rank {rank}"


def packed_calls(seed: int, calls: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return calls with packed MXFP4 weights, and with the FP8 weights that they stand for."""
    packed, wide = [], []
    for rank, call in enumerate(calls):
        both = {}
        for name in ("w13", "w2"):
            drawn = weights(seed * 100 + rank * 10 + len(name), tuple(call[name].shape), 114, 121)
            both[name] = pack_mxfp4(tuple(part.cuda() for part in drawn))
        packed.append(call | both)
        wide.append(call | {name: unpack(w, call[name].shape[2]) for name, w in both.items()})
    return packed, wide


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", PACKED, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}"
)
def test_layers_of_packed_mxfp4_have_the_bits_of_fp8(
    sizes: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in seeds(request, 40):
            packed, wide = packed_calls(seed, calls_of(drawn_layer(seed, sizes, dtype)))
            wanted = ranks.moe(one_or_other(wide, fused=False))
            ranks.check()
            for fused in (True, False, True):
                for rank, (out, want) in enumerate(zip(ranks.moe(one_or_other(packed, fused)), wanted, strict=True)):
                    assert same_bits(out, want), f"layer of seed {seed}, rank {rank}, fused {fused}"
            ranks.check()


@pytest.mark.gpu1
@pytest.mark.parametrize("schedule", PACKED_SCHEDULES)
def test_fused_layers_of_packed_mxfp4_have_the_same_bits_in_every_schedule(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_schedule = replace(PACKED_SCHEDULES[schedule], dynamic=False)
    sizes = {**LARGE, "max_tokens": 700}
    with opened(sizes) as ranks:
        case = random_layer(5, **sizes, dtype=torch.bfloat16)
        case.wire = None
        packed, wide = packed_calls(5, calls_of(case))
        wanted = ranks.moe(one_or_other(wide, fused=False))
        tuning.forget()  # plans that are kept
        monkeypatch.setattr(schedules, "packed_as", lambda of: packed_schedule)
        for out, want in zip(ranks.moe(one_or_other(packed, fused=True)), wanted, strict=True):
            assert same_bits(out, want)
    tuning.forget()


@pytest.mark.gpu1
def test_a_layer_of_packed_mxfp4_measures_its_forms() -> None:
    sizes = SIZES[3] | {"ranks": 1}
    case = full_layer(2, sizes)
    with opened(sizes) as ranks:
        (buffer,), (packed, wide) = ranks.buffers, packed_calls(2, calls_of(case))
        outs = [buffer.moe(**one_or_other(packed, None)[0]) for _ in range(3)]
        want = buffer.moe(**one_or_other(wide, fused=False)[0])
        assert [kind.weights for kind in buffer.rounds.layer_forms] == ["int32"]
        assert all(same_bits(out, want) for out in outs)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_large_tiles() -> None:
    with opened(LARGE) as ranks:
        for seed in range(4):
            case = random_layer(seed, **LARGE, dtype=torch.bfloat16, fp8=True)
            checked(ranks, case, calls_of(case))


@pytest.mark.gpu1
@pytest.mark.parametrize("layout", ["row", "column"])
def test_the_method_has_the_bits_of_its_parts(layout: str) -> None:
    """An FP8 dispatch, scales by row or by column, two GEMMs, a combine."""
    sizes = SIZES[3] | {"ranks": 1}
    case = full_layer(0, sizes)
    case.fp8 = True
    with opened(sizes) as ranks:
        (buffer,) = ranks.buffers
        call = case.call(0, "cuda")
        out = buffer.moe(**call)
        routing = {name: call[name] for name in ("x", "topk_idx", "topk_weights")}
        routed = buffer.dispatch(**routing, quantize="fp8", scale_layout=layout, sync=True)
        rows, counts = Fp8(routed.x, routed.scales), routed.tokens_per_expert
        gate = {"activation": "swiglu", "interleaved": case.interleaved}
        inner = grouped_gemm(rows, call["w13"], counts, **gate, quantize="fp8")
        y = grouped_gemm(inner, call["w2"], counts)
        assert same_bits(out, buffer.combine(y, routed.handle, bias=call["bias"], wire=call["wire"]))


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_graph_replays_with_other_routing(fused: bool) -> None:
    sizes = SIZES[3] | {"ranks": 2}
    cases = [full_layer(seed, sizes) for seed in range(8)]
    with opened(sizes) as ranks:
        for case in cases:
            case.fp8 = True
        check_replays(ranks, cases, one_or_other(calls_of(cases[0]), fused))


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_bad_id_is_told_and_the_next_layer_is_right(fused: bool) -> None:
    sizes = SIZES[0] | {"ranks": 2}
    case = full_layer(1, sizes)
    case.fp8 = True
    with opened(sizes) as ranks:
        calls = one_or_other(calls_of(case), fused)
        wrong = [dict(call) for call in calls]
        wrong[1]["topk_idx"] = calls[1]["topk_idx"].clone().fill_(sizes["num_experts"])
        ranks.moe(wrong)
        for buffer in ranks.buffers:
            with pytest.raises(moecomm.BadInput) as caught:
                buffer.check()
            assert (caught.value.argument, caught.value.rank) == ("topk_idx", 1)
        checked(ranks, case, calls)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", GPU_COUNTS)
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
@pytest.mark.parametrize("which", PROCESSES)
def test_random_layers_of_processes(
    which: str, fused: bool, count: int, request: pytest.FixtureRequest, gpu_ranks: Ranks
) -> None:
    sizes, share = PROCESSES[which]
    gpu_ranks.start(
        count, layers_of_a_process, sizes | {"ranks": count}, torch.bfloat16, seeds(request, share), fused, True
    )
    found = gpu_ranks.results(count, timeout_s=850)
    assert list(found.values()) == ["right"] * count, found


@pytest.mark.parametrize("count", GPU_COUNTS)
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_graph_replays_with_other_routing_on_gpus(gpu_ranks: Ranks, fused: bool, count: int) -> None:
    assert gpu_ranks.run(count, replayed, SIZES[3] | {"ranks": count}, fused, True) == ["right"] * count
