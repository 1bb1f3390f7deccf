"""Buffer.moe on GPUs, against float64: several ranks on one GPU, and one process a GPU.

`pytest tests/gpu/test_moe.py --gpu-cases 10000` runs more random layers.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.experts import most_experts
from moecomm.fused import SCHEDULES, Mxfp4, choose, schedules, weight_format
from moecomm.fused.compute import layer_kernel, rows_per_counter
from moecomm.fused.fp4 import dequantize
from moecomm.fused.kernels import gemm_kernel
from moecomm.gpu import plain_kernel, tuning
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.layers import Bounds, never
from moecomm.gpu.tuning.measured import Clock, time_forms
from moecomm.testing import LayerCase, LocalBuffers, random_layer
from moecomm.testing.prepare import prepare_moe

from ..conftest import GPU_COUNTS, Ranks, share_cores
from .layers import check_replays, checked, compile_all, copy_into

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 64, "intermediate": 48, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 2, "hidden": 8, "intermediate": 8, "num_experts": 2, "topk": 1, "max_tokens": 17},
    {"ranks": 3, "hidden": 200, "intermediate": 104, "num_experts": 12, "topk": 3, "max_tokens": 90},
    # More entries than ranks publish ids for: row descriptors travel, which name rows that are already here.
    {"ranks": 4, "hidden": 512, "intermediate": 136, "num_experts": 16, "topk": 8, "max_tokens": 520},
    {"ranks": 8, "hidden": 136, "intermediate": 72, "num_experts": 32, "topk": 6, "max_tokens": 90},
    # The kernels of SIZES[2]; some ranks have an expert more than the others, of 2 ranks and of 4 as well.
    {"ranks": 3, "hidden": 200, "intermediate": 104, "num_experts": 11, "topk": 3, "max_tokens": 90},
]
LARGE: dict[str, Any] = {  # four tiles of columns and more, groups of several hundred rows
    "ranks": 2,
    "hidden": 1024,
    "intermediate": 1032,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 1500,
}


def of_processes(sizes: list[dict[str, Any]], large: dict[str, Any]) -> dict[str, tuple[dict[str, Any], int]]:
    """Sizes of processes, four of them if nobody says how many, and one of how many --gpu-cases each gets: most, where
    the reference takes no time.
    """
    four = {"ranks": 4}
    return {
        "few": (sizes[2] | four, 1),
        "uneven": (sizes[-1] | four, 10),
        "small": (sizes[3], 30),
        "large": (large | four, 100),
    }


PROCESSES = of_processes(SIZES, LARGE)
DTYPES = (torch.bfloat16, torch.float16)
ODD = {"ranks": 2, "hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40}


FUSED, NAMES = (False, True), {False: "sequential", True: "fused"}


def of_buffer(sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of `sizes` that a Buffer has."""
    return {name: size for name, size in sizes.items() if name not in ("intermediate", "ranks")}


def opened(sizes: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> LocalBuffers:
    return LocalBuffers(sizes["ranks"], **of_buffer(sizes), dtype=dtype, backend="lsa", device=0, timeout_s=20)


def calls_of(case: LayerCase) -> list[dict[str, Any]]:
    return [case.call(rank, "cuda") for rank in range(len(case.x))]


def one_or_other(given: list[dict[str, Any]], fused: bool | None) -> list[dict[str, Any]]:
    """The same calls, rows travelling under the experts or not; sums of ranks travel in float32 in all of them."""
    return [{**call, "fused": fused, "wire": None} for call in given]


def seeds(request: pytest.FixtureRequest, share: int) -> range:
    first = request.config.getoption("--seed") * 1_000_000
    return range(first, first + max(4, request.config.getoption("--gpu-cases") // share))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile kernels that take long into the cache, on all cores."""
    if not torch.cuda.is_available():
        return
    kernels: set[plain_kernel.PlainKernel] = set()
    for sizes in (*SIZES, SIZES[3] | {"ranks": 2}, LARGE, *(sizes for sizes, _ in PROCESSES.values()), ODD):
        hidden, inner = sizes["hidden"], sizes["intermediate"]
        local = most_experts(sizes["num_experts"], sizes["ranks"])
        for tokens in range(sizes["max_tokens"] + 1):
            rows = max(1, tokens * sizes["topk"] * sizes["ranks"] // sizes["num_experts"])
            first, second = (SCHEDULES[choose(rows, local, *w)] for w in ((2 * inner, hidden), (hidden, inner)))
            counted = rows_per_counter(rows * local)
            for dtype, apart in itertools.product(DTYPES, (False, True)):
                kernels |= {gemm_kernel(dtype, True, apart, first), gemm_kernel(dtype, False, False, second)}
                both = schedules.schedule_of_both(dtype, rows, inner)
                kernels.add(layer_kernel(dtype, apart, both, hidden, counted=counted))
    compile_all(kernels)


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}")
def test_random_layers_of_virtual_ranks(
    sizes: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in seeds(request, 20):
            case = random_layer(seed, **sizes, dtype=dtype)
            calls = calls_of(case)
            for out, again in zip(checked(ranks, case, calls), ranks.moe(calls), strict=True):
                assert same_bits(out, again)


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}")
def test_fused_layers_have_the_bits_of_dispatch_and_combine(
    sizes: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in seeds(request, 20):
            case = random_layer(seed, **sizes, dtype=dtype)
            case.wire = None
            calls = calls_of(case)
            outs = ranks.moe(one_or_other(calls, fused=True))
            ranks.check()
            for rank, (out, other) in enumerate(zip(outs, ranks.moe(one_or_other(calls, fused=False)), strict=True)):
                case.check(rank, out)
                assert same_bits(out, other), f"layer of seed {seed}, rank {rank}"


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_biases_and_activations_in_both_forms(weights: str) -> None:
    drawn = set()
    with opened(ODD) as ranks:
        for seed in range(16):
            case = random_layer(seed, **ODD, dtype=torch.bfloat16, fp8=weights == "fp8", experts=True)
            case.wire = None
            drawn.add(case.activation.kernel)
            calls = calls_of(case)
            outs = ranks.moe(one_or_other(calls, fused=True))
            ranks.check()
            for rank, (out, other) in enumerate(zip(outs, ranks.moe(one_or_other(calls, fused=False)), strict=True)):
                case.check(rank, out)
                assert same_bits(out, other), f"layer of seed {seed}, rank {rank}"
    assert len(drawn) == 6


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_mxfp4_weights_are_the_bf16_weights_that_they_stand_for(fused: bool) -> None:
    g = torch.Generator().manual_seed(0)
    case = random_layer(2, **ODD, dtype=torch.bfloat16, experts=True)
    case.interleaved, case.wire = False, None
    pairs = {}
    for name, (experts, rows, columns) in (("w13", case.w13.shape), ("w2", case.w2.shape)):
        data = torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8)
        pairs[name] = Mxfp4(data, torch.randint(120, 125, (experts, rows, columns // 32), generator=g).to(torch.uint8))
    case.w13, case.w2 = dequantize(pairs["w13"]), dequantize(pairs["w2"])
    local = ODD["num_experts"] // ODD["ranks"]
    with opened(ODD) as ranks:
        calls = one_or_other(calls_of(case), fused)
        given = []
        for rank, call in enumerate(calls):
            mine = slice(rank * local, (rank + 1) * local)
            given.append(call | {name: Mxfp4(w.data[mine].cuda(), w.scales[mine].cuda()) for name, w in pairs.items()})
        wanted = checked(ranks, case, calls)
        for out, want in zip(ranks.moe(given), wanted, strict=True):
            assert same_bits(out, want)


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_the_tuning_table_decides_the_form(fused: bool) -> None:
    sizes = SIZES[3] | {"ranks": 2}
    bounds = Bounds("bf16", 2, 1, 1) if fused else never("bf16", 2)
    with tuning.use(Table(layers=(bounds,))), opened(sizes) as ranks:
        assert [buffer.rounds.origin.fused_weights[torch.bfloat16] for buffer in ranks.buffers] == [fused] * 2
        case = random_layer(3, **sizes, dtype=torch.bfloat16)
        case.wire = None
        for rank, out in enumerate(ranks.moe(calls_of(case))):
            case.check(rank, out)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_large_tiles(fused: bool) -> None:
    with opened(LARGE) as ranks:
        for seed in range(6):
            case = random_layer(seed, **LARGE, dtype=torch.bfloat16)
            case.wire = None
            checked(ranks, case, one_or_other(calls_of(case), fused))


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_graph_replays_with_other_routing(fused: bool) -> None:
    sizes = SIZES[3] | {"ranks": 2}
    cases = [full_layer(seed, sizes) for seed in range(12)]
    with opened(sizes) as ranks:
        check_replays(ranks, cases, one_or_other(calls_of(cases[0]), fused))


def full_layer(seed: int, sizes: dict[str, Any]) -> LayerCase:
    """A random layer with all tokens on every rank, int64 ids, weights and no bias: what one graph can replay."""
    case = random_layer(seed, **sizes, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    tokens, topk, experts = sizes["max_tokens"], sizes["topk"], sizes["num_experts"]
    for rank in range(sizes["ranks"]):
        case.x[rank] = torch.randn(tokens, sizes["hidden"], generator=g).bfloat16()
        ids = torch.randint(-1 if seed % 3 else 0, 1 + seed % experts, (tokens, topk), generator=g)
        case.topk_idx[rank] = ids if seed else torch.rand(tokens, experts, generator=g).argsort(dim=1)[:, :topk]
        case.topk_weights[rank], case.bias[rank] = torch.rand(tokens, topk, generator=g), None
    case.interleaved, case.wire = False, None
    return case


@pytest.mark.gpu1
def test_order_of_w13_changes_no_bit() -> None:
    sizes = SIZES[2]
    with opened(sizes) as ranks:
        for seed in range(5):
            case, outs = random_layer(seed, **sizes, dtype=torch.bfloat16), []
            for interleaved in (False, True):
                case.interleaved = interleaved
                outs.append(ranks.moe(calls_of(case)))
            ranks.check()
            assert all(same_bits(one, other) for one, other in zip(*outs, strict=True))


@pytest.mark.gpu1
def test_what_ours_lacks_goes_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "ours_lacks", lambda *what: "this test says so")
    with opened(ODD) as ranks:
        for seed in range(8):
            case = random_layer(seed, **ODD, dtype=torch.bfloat16)
            outs = ranks.moe(calls_of(case))
            ranks.check()
            for out, x, mine in zip(outs, case.x, ours_of(ODD, case, monkeypatch), strict=True):
                # torch rounds gate and up as well, and sums of them: some roundings of what is about 1.
                torch.testing.assert_close(out.float(), mine.float(), rtol=2**-5, atol=2**-5)
                assert out.shape == x.shape


def ours_of(sizes: dict[str, Any], case: LayerCase, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    with monkeypatch.context() as context:
        context.setattr(weight_format, "ours_lacks", lambda *what: "")
        with opened(sizes) as ranks:
            return ranks.moe(calls_of(case))


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_bad_id_is_told_and_the_next_layer_is_right(fused: bool) -> None:
    case = full_layer(1, ODD)
    with opened(ODD) as ranks:
        calls = one_or_other(calls_of(case), fused)
        wrong = [dict(call) for call in calls]
        wrong[1]["topk_idx"] = calls[1]["topk_idx"].clone().fill_(ODD["num_experts"])
        ranks.moe(wrong)
        for buffer in ranks.buffers:
            with pytest.raises(moecomm.BadInput) as caught:
                buffer.check()
            assert (caught.value.argument, caught.value.rank) == ("topk_idx", 1)
            buffer.check()
        checked(ranks, case, calls)


@pytest.mark.gpu1
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_rank_that_does_not_come_to_a_fused_layer_is_a_timeout(weights: str) -> None:
    """One rank alone goes through all of its launches: none of them hangs, and the context lives."""
    case = full_layer(1, ODD)
    case.fp8 = weights == "fp8"
    with LocalBuffers(2, **of_buffer(ODD), backend="lsa", device=0, timeout_s=2) as ranks:
        call = one_or_other(calls_of(case), fused=True)[0]
        buffer = ranks.buffers[0]
        begin = time.monotonic()
        buffer.moe(**call)
        with pytest.raises(moecomm.Timeout) as caught:
            buffer.check()
        assert time.monotonic() - begin < 6
        assert (caught.value.rank, caught.value.peer, caught.value.phase) == (0, 1, "header")
        assert torch.ones(5, device="cuda").sum().item() == 5
    with opened(ODD) as ranks:
        checked(ranks, case, one_or_other(calls_of(case), fused=True))


@pytest.mark.gpu1
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_rank_whose_experts_do_not_come_to_a_fused_layer_is_a_timeout(weights: str) -> None:
    case = full_layer(1, ODD)
    case.fp8 = weights == "fp8"
    with LocalBuffers(2, **of_buffer(ODD), backend="lsa", device=0, timeout_s=2) as ranks:
        calls = one_or_other(calls_of(case), fused=True)
        given = [prepare_moe(buffer, **call) for buffer, call in zip(ranks.buffers, calls, strict=True)]
        for one in given:
            one.publish()
        routed = ranks.dispatch_layers(given)
        with torch.cuda.stream(ranks.streams[0]):  # that of its rounds, which check() waits for
            given[0].compute(routed[0])
            given[0].prepare_reduce()
            given[0].run_reduce()
        with pytest.raises(moecomm.Timeout) as caught:
            ranks.buffers[0].check()
        assert (caught.value.rank, caught.value.peer, caught.value.phase) == (0, 1, "reduced")
        with pytest.raises(moecomm.Timeout):
            called(ranks.buffers[1], calls[1])


def called(buffer: moecomm.Buffer, call: dict[str, Any]) -> None:
    buffer.moe(**call)
    buffer.check()


def layers_of_a_process(
    rank: int, group: Any, sizes: dict[str, Any], dtype: torch.dtype, numbers: range, fused: bool, fp8: bool
) -> str:
    share_cores(group.size())
    with moecomm.Buffer(group, **of_buffer(sizes), dtype=dtype, backend="lsa") as buffer:
        for done, seed in enumerate(numbers):
            if rank == 0 and done and done % 200 == 0:  # pytest -s shows how far a long run has come
                print(f"{fused}, {dtype}{', weights in FP8' * fp8}: {done} layers", flush=True)
            case = random_layer(seed, **sizes, dtype=dtype, fp8=fp8)
            if fused:
                case.wire = None
            call = case.call(rank, buffer.device)
            # Rows that travel under the experts beside those that do not; else what is chosen beside them.
            out, again = buffer.moe(**call, fused=False if fused else None), buffer.moe(**call, fused=fused)
            buffer.check()
            case.check(rank, out)
            assert same_bits(out, again), f"layer of seed {seed}: other bits"
    return "right"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", GPU_COUNTS)
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PROCESSES)
def test_random_layers_of_processes(
    which: str, dtype: torch.dtype, fused: bool, count: int, request: pytest.FixtureRequest, gpu_ranks: Ranks
) -> None:
    sizes, share = PROCESSES[which]
    gpu_ranks.start(count, layers_of_a_process, sizes | {"ranks": count}, dtype, seeds(request, share), fused, False)
    found = gpu_ranks.results(count, timeout_s=850)
    assert list(found.values()) == ["right"] * count, found


def replayed(rank: int, group: Any, sizes: dict[str, Any], fused: bool, fp8: bool = False) -> str:
    cases = [full_layer(seed, sizes) for seed in range(20)]
    for case in cases:
        case.fp8 = fp8
    with moecomm.Buffer(group, **of_buffer(sizes), backend="lsa") as buffer:
        mine = cases[0].call(rank, buffer.device) | {"fused": fused}
        buffer.moe(**mine)
        buffer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = buffer.moe(**mine)
        for case in cases:
            copy_into(mine, case.call(rank, buffer.device))
            graph.replay()
            buffer.check()
            case.check(rank, out)
    return "right"


@pytest.mark.parametrize("count", GPU_COUNTS)
@pytest.mark.parametrize("fused", FUSED, ids=NAMES.get)
def test_a_graph_replays_with_other_routing_on_gpus(gpu_ranks: Ranks, fused: bool, count: int) -> None:
    assert gpu_ranks.run(count, replayed, SIZES[3] | {"ranks": count}, fused) == ["right"] * count


def default_form(rank: int, group: Any, tokens: int) -> tuple[bool, dict[str, float]]:
    """Return whether layers run fused by default, as the first call has measured, and the time of each form."""
    ranks, hidden, inner, local, topk = group.size(), 2048, 1024, 16, 4
    sizes = {"hidden": hidden, "num_experts": local * ranks, "topk": topk, "max_tokens": tokens}
    g = torch.Generator("cuda").manual_seed(rank)
    drawn: dict[str, Any] = {"generator": g, "device": "cuda"}
    x = torch.randn(tokens, hidden, **drawn).bfloat16()
    ids = torch.rand(tokens, local * ranks, **drawn).topk(topk, dim=1).indices
    w13, w2 = (torch.randn(local, *of, **drawn).bfloat16() / 64 for of in ((2 * inner, hidden), (hidden, inner)))
    with moecomm.Buffer(group, **sizes, backend="lsa") as buffer:
        buffer.rounds.layer_forms.clear()  # those of earlier runs
        layer = partial(buffer.moe, x, ids, torch.rand(tokens, topk, **drawn), w13, w2)
        want = layer(fused=False)
        assert all(same_bits(layer(), want) for _ in range(3))
        (form,) = buffer.rounds.layer_forms.values()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer()
        graph.replay()
        buffer.check()
        assert same_bits(out, want)
        both = {name: partial(layer, fused=fused) for fused, name in NAMES.items()}
        clock = Clock(buffer.device, head_start=4_000_000)
        return form, time_forms(clock, both, lambda call: call(), lambda mark: buffer.check())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.gpu1), *GPU_COUNTS])
@pytest.mark.parametrize("tokens", [16, 2048])
def test_all_ranks_take_the_faster_of_fused_and_unfused(gpu_ranks: Ranks, count: int, tokens: int) -> None:
    """Within the noise of two measurements."""
    found = gpu_ranks.run(count, default_form, tokens)
    assert len({form for form, _ in found}) == 1
    us = {fused: max(times[name] for _, times in found) for fused, name in NAMES.items()}
    assert us[found[0][0]] <= 1.1 * min(us.values()), us
