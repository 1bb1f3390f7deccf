"""Fused operators on GPUs: virtual ranks of one GPU, and one process a GPU.  Every wait is bounded.

Kernels are compiled beforehand by tests/gpu/compile_overlap.py, else by the first call of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm.gpu import plain_kernel
from moecomm.overlap.gpu import GpuExecutor
from moecomm.overlap.unfused import UnfusedExecutor

from ..conftest import Ranks
from .overlap_cases import Case, cases, same
from .test_windows import load_kernels, windows

NBYTES = 1 << 28
TURNS = 3  # both halves of staging, and the first one again


def load(executor: GpuExecutor, call: Callable[[GpuExecutor], Any]) -> None:
    """Load what a call launches: loading may wait for kernels that run."""
    launch = executor._launch
    executor._launch = lambda kernel, blocks, args: plain_kernel.load(kernel, executor._device.index)  # type: ignore
    call(executor)
    executor._launch = launch  # type: ignore[method-assign]


def warm_allocator() -> None:
    """Memory for the results of the current stream, so that no call allocates while a kernel waits for another rank."""
    kept = [torch.empty(n << 10, dtype=torch.uint8, device="cuda") for n in (1 << 18, 1 << 16, *[512] * 16)]
    del kept


@pytest.mark.gpu1
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_virtual_ranks_get_the_bits_of_the_reference(ranks: int) -> None:
    with windows(ranks, NBYTES) as (opened, each):
        executors = [GpuExecutor(window) for window in opened]
        for executor in executors:
            executor._units //= ranks  # blocks of all ranks are resident at once
        each(lambda window: warm_allocator(), waiting=False)
        for case in cases(ranks):
            load(executors[0], lambda executor, case=case: case.call(executor, *case.inputs(0, 0, "cuda")))
            for turn in range(TURNS):
                inputs = [case.inputs(rank, turn, "cuda") for rank in range(ranks)]
                torch.cuda.synchronize()
                found = each(
                    lambda window, given=inputs, case=case: case.call(executors[window.rank], *given[window.rank])
                )
                for window in opened:
                    window.check()
                for rank, result in enumerate(found):
                    assert same(result, case.wanted(rank, inputs)), (case, turn, rank)


@pytest.mark.gpu1
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_virtual_ranks_add_up_in_rank_order(ranks: int) -> None:
    """The all-reduce alone, with values whose sum depends on the order."""
    with windows(ranks, NBYTES) as (opened, each):
        executors = [GpuExecutor(window) for window in opened]
        for executor in executors:
            executor._units //= ranks
        each(lambda window: warm_allocator(), waiting=False)
        for dtype, count in SUMS:
            y = [draw(dtype, count, rank) for rank in range(ranks)]
            load(executors[0], lambda executor, mine=y[0]: executor.all_reduce(mine))
            total = torch.zeros(count, device="cuda")
            for mine in y:
                total += mine.float()
            torch.cuda.synchronize()
            for _ in range(TURNS):
                found = each(lambda window, y=y: executors[window.rank].all_reduce(y[window.rank]))
                for window in opened:
                    window.check()
                assert all(torch.equal(of, total.to(dtype)) for of in found), (dtype, count)
                del found  # the next calls take its memory


COUNTS = (8, 4 * 4096, 200 * 8192 + 8)
SUMS = [(dtype, count) for dtype in (torch.bfloat16, torch.float16) for count in COUNTS]


def draw(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=g) * 4**rank).to(dtype).cuda()


def tensors(inputs: tuple[Any, Any]) -> list[torch.Tensor]:
    """Both matrices, with their scales."""
    return [tensor for of in inputs for tensor in (of if isinstance(of, tuple) else (of,))]


def _processes(rank: int, group: Any, fused: bool) -> str:
    """Each case eagerly, and replayed in a graph with new inputs."""
    load_kernels()
    ranks = group.size()
    with moecomm.Window(group, NBYTES, backend="lsa", timeout_s=20.0) as window:
        executor: GpuExecutor | UnfusedExecutor = (made := GpuExecutor(window))
        if not fused:
            executor = UnfusedExecutor(window, made.staging, made.all_reduce)
        for case in cases(ranks):
            _check(executor, window, case, rank, ranks)
    return "done"


def _check(executor: GpuExecutor | UnfusedExecutor, window: moecomm.Window, case: Case, rank: int, ranks: int) -> None:
    mine = case.inputs(rank, 0, "cuda")
    first = case.call(executor, *mine)
    window.check()
    all_of = [case.inputs(of, 0, "cuda") for of in range(ranks)]
    assert same(first, case.wanted(rank, all_of)), (case, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [case.call(executor, *mine) for _ in range(2)]
    for turn in range(1, TURNS + 1):
        all_of = [case.inputs(of, turn, "cuda") for of in range(ranks)]
        for to, new in zip(tensors(mine), tensors(all_of[rank]), strict=True):
            to.copy_(new)
        wanted = case.wanted(rank, all_of)
        graph.replay()
        window.check()
        assert all(same(found, wanted) for found in results), (case, turn)


@pytest.mark.gpu2
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_processes_get_the_bits_of_the_reference(fused: bool, gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _processes, fused)
    assert gpu_ranks.results(count, timeout_s=220) == dict.fromkeys(range(count), "done")


@pytest.mark.gpu1
@pytest.mark.timeout(120)
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_virtual_rank_that_does_not_come_is_named_and_the_context_lives(operator: str) -> None:
    case = next(case for case in cases(2) if case.operator == operator)
    with windows(2, NBYTES, timeout_s=2.0) as (opened, each):
        executors = [GpuExecutor(window) for window in opened]
        given = case.inputs(0, 0, "cuda")
        load(executors[0], lambda executor: case.call(executor, *given))
        each(lambda window: case.call(executors[0], *given) if window.rank == 0 else None, waiting=False)
        with pytest.raises(moecomm.Timeout) as caught:
            opened[0].check()
        assert caught.value.peer == 1
        assert torch.ones(8, device="cuda").sum().item() == 8
