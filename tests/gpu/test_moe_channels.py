"""Expert layers whose weights have scales of channels, FP8 and INT8, on a GPU: both forms, against CPU ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecomm.base.experts import most_experts
from moecomm.fused import SCHEDULES, gemm, quantize_channels, schedules
from moecomm.fused.compute import layer_kernel, rows_per_counter
from moecomm.fused.kernels import FP8, Epilogue, gemm_kernel, publish_kernel
from moecomm.gpu import tuning
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.testing import LayerCase, LocalBuffers, random_layer

from .layers import compile_all

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(900)]
BF16 = torch.bfloat16
KINDS = [FP8, torch.int8]
ODD: dict[str, Any] = {"ranks": 2, "hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40}
# The others: rows of several pieces, columns that divide no block or piece, more entries than ranks publish ids for.
SIZES: list[dict[str, Any]] = [
    ODD,
    {"ranks": 4, "hidden": 528, "intermediate": 144, "num_experts": 16, "topk": 8, "max_tokens": 520},
    {"ranks": 2, "hidden": 1040, "intermediate": 1072, "num_experts": 4, "topk": 2, "max_tokens": 1500},
]


def kernels_of(sizes: dict[str, Any]) -> Iterator[PlainKernel]:
    """Those of SwiGLU without biases."""
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    local, epilogue = most_experts(sizes["num_experts"], sizes["ranks"]), Epilogue("swiglu", False, True)
    for kind, tokens in itertools.product(KINDS, range(sizes["max_tokens"] + 1)):
        rows = max(1, tokens * sizes["topk"] * sizes["ranks"] // sizes["num_experts"])
        tiled, counted = gemm.tiled_as(kind, True), rows_per_counter(rows * local)
        both = schedules.schedule_of_both(tiled, rows, inner)
        first = schedules.schedule_of(tiled, rows, local, 2 * inner, hidden // 2, 132)
        second = schedules.schedule_of(tiled, rows, local, hidden, inner // 2, 132)
        yield publish_kernel(BF16, kind, hidden, True)
        yield gemm_kernel(kind, False, False, second, BF16, Epilogue("swiglu", False, True))
        for apart in (False, True):
            yield layer_kernel(kind, apart, both, hidden, BF16, counted, epilogue)
            yield gemm_kernel(kind, True, apart, first, BF16, epilogue)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if torch.cuda.is_available():
        compile_all({kernel for sizes in SIZES for kernel in kernels_of(sizes)})


def of_buffer(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if name not in ("intermediate", "ranks")}


def opened(sizes: dict[str, Any], dtype: torch.dtype = BF16) -> LocalBuffers:
    return LocalBuffers(sizes["ranks"], **of_buffer(sizes), dtype=dtype, backend="lsa", device=0, timeout_s=20)


def calls_of(case: LayerCase, kind: torch.dtype) -> list[dict[str, Any]]:
    calls = [{**case.call(rank), "wire": None} for rank in range(len(case.x))]
    for call in calls:
        call |= {name: quantize_channels(call[name], kind) for name in ("w13", "w2")}
    return calls


def on_gpu(call: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The call with its tensors, and those of pairs, on the GPU."""
    found: dict[str, Any] = dict(call)
    for name, value in call.items():
        if isinstance(value, tuple):
            found[name] = type(value)(*(part.cuda() for part in value))
        elif isinstance(value, torch.Tensor):
            found[name] = value.cuda()
    return found | more


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_cpu_ranks(kind: torch.dtype, dtype: torch.dtype) -> None:
    """A cast of values beside the middle of two may differ, after sums in another order."""
    of_cpus = LocalBuffers(ODD["ranks"], **of_buffer(ODD), dtype=dtype, backend="host", timeout_s=20)
    with opened(ODD, dtype) as ranks, of_cpus as cpus:
        for seed in range(4):
            case = random_layer(seed, **ODD, dtype=dtype, experts=seed % 2 == 1)
            calls = calls_of(case, kind)
            wanted = cpus.moe(calls)
            for fused in (False, True):
                outs = ranks.moe([on_gpu(call, fused=fused) for call in calls])
                ranks.check()
                for rank, (out, want) in enumerate(zip(outs, wanted, strict=True)):
                    off = (out.cpu().float() - want.float()).norm()
                    assert float(off) <= 0.02 * float(want.float().norm()) + 1e-6, (seed, rank, fused)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}")
@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_have_the_bits_of_unfused_ones(kind: torch.dtype, sizes: dict[str, Any]) -> None:
    with opened(sizes) as ranks:
        for seed in range(6):
            case = random_layer(seed, **sizes, dtype=BF16)
            calls = calls_of(case, kind)
            others = ranks.moe([on_gpu(call, fused=False) for call in calls])
            for _ in range(2):
                outs = ranks.moe([on_gpu(call, fused=True) for call in calls])
                ranks.check()
                for rank, (out, other) in enumerate(zip(outs, others, strict=True)):
                    assert same_bits(out, other), f"layer of seed {seed}, rank {rank}"


@pytest.mark.parametrize("fused", [False, True])
def test_graphs_replay_what_they_find(fused: bool) -> None:
    sizes = SIZES[2] | {"ranks": 1}
    with LocalBuffers(1, **of_buffer(sizes), backend="lsa", device=0, timeout_s=20) as ranks:
        (buffer,) = ranks.buffers
        one, other = (random_layer(seed, **sizes, dtype=BF16) for seed in (2, 3))
        calls = [on_gpu(calls_of(case, FP8)[0], fused=fused) for case in (one, other)]
        tokens = min(len(call["x"]) for call in calls)
        for call in calls:
            call |= {"bias": None, "interleaved": False, "topk_weights": None}
            call |= {name: call[name][:tokens].contiguous() for name in ("x", "topk_idx")}
            call["topk_idx"] = call["topk_idx"].long()
        wanted = [buffer.moe(**call).clone() for call in calls]
        graph, given = torch.cuda.CUDAGraph(), {**calls[0]}
        given |= {name: given[name].clone() for name in ("x", "topk_idx")}
        given |= {name: type(given[name])(*(part.clone() for part in given[name])) for name in ("w13", "w2")}
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=ranks.streams[0]):
            out = buffer.moe(**given)
        for call, want in zip(calls, wanted, strict=True):
            for name in ("x", "topk_idx"):
                given[name].copy_(call[name])
            for name in ("w13", "w2"):
                for to, part in zip(given[name], call[name], strict=True):
                    to.copy_(part)
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, want)


def test_every_schedule_has_the_same_bits() -> None:
    """Of fused layers and of GEMMs: what tensor cores add depends on no tile."""
    with opened(SIZES[1]) as ranks:
        case = random_layer(2, **SIZES[1], dtype=BF16)
        calls = [on_gpu(call) for call in calls_of(case, FP8)]
        wanted = ranks.moe([{**call, "fused": False} for call in calls])
        for schedule in SCHEDULES.values():
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(schedules, "schedule_of_both", lambda *about, one=schedule: one)
                patched.setattr(schedules, "schedule_of", lambda *about, one=schedule: one)
                tuning.forget()  # plans of other schedules
                for fused in (False, True):
                    outs = ranks.moe([{**call, "fused": fused} for call in calls])
                    for out, want in zip(outs, wanted, strict=True):
                        assert same_bits(out, want), (schedule, fused)
        tuning.forget()
