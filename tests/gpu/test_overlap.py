"""Fused operators on GPUs: virtual ranks of one GPU, and one process a GPU.  Every wait is bounded.

Kernels are compiled beforehand by tests/gpu/compile_overlap.py, else by the first call of each kind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import overlap
from moecomm.gpu import plain_kernel
from moecomm.overlap import sizes
from moecomm.overlap.agreement import FirstCalls
from moecomm.overlap.exchanges import Copies, collectives_of
from moecomm.overlap.executors import GpuExecutors
from moecomm.overlap.gpu import GpuExecutor
from moecomm.overlap.measured import Choices
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm_bench.exchange import nccl_group

from ..conftest import Ranks
from ..live import ROOM_S
from .overlap_cases import Case, cases, exact_cases, same
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


@pytest.mark.gpu1
@pytest.mark.timeout(60)
def test_forms_are_timed_on_the_device() -> None:
    """A rank alone: a form of one product, and one of eight."""

    def several(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [x @ w for _ in range(8)]

    x = torch.ones(2048, 2048, dtype=torch.bfloat16, device="cuda")
    with moecomm.Window("self", 4096, backend="lsa", timeout_s=20.0) as window:
        choices = Choices(window, FirstCalls(window, 0))
        call = sizes.matmul_all_reduce(1, x, x)
        assert choices.measure(call, {"fused": several, "copies": torch.mm}, (x, x)) == "copies"
        (choice,) = choices.made
        assert 4 < choice.us["fused"] / choice.us["copies"] < 16 and choice.us["copies"] > 1


COUNTS = (8, 4 * 4096, 200 * 8192 + 8)
SUMS = [(dtype, count) for dtype in (torch.bfloat16, torch.float16) for count in COUNTS]


def draw(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=g) * 4**rank).to(dtype).cuda()


def tensors(inputs: tuple[Any, Any]) -> list[torch.Tensor]:
    """Both matrices, with their scales."""
    return [tensor for of in inputs for tensor in (of if isinstance(of, tuple) else (of,))]


def _processes(rank: int, group: Any, form: str) -> str:
    """Each case eagerly, and replayed in a graph with new inputs."""
    load_kernels()
    ranks = group.size()
    if form == "collectives":
        group = nccl_group()
    with moecomm.Window(group, NBYTES, backend="lsa", timeout_s=20.0) as window:
        executor: GpuExecutor | UnfusedExecutor = (made := GpuExecutor(window))
        if form == "copies":
            executor = UnfusedExecutor(Copies(window, made.staging), made.all_reduce)
        elif form == "collectives":
            found = collectives_of(window)
            assert found is not None
            executor = UnfusedExecutor(found)
        for case in exact_cases(ranks) if form == "collectives" else cases(ranks):
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
@pytest.mark.parametrize("form", ["fused", "copies", "collectives"])
def test_processes_get_the_bits_of_the_reference(form: str, gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _processes, form)
    assert gpu_ranks.results(count, timeout_s=220) == dict.fromkeys(range(count), "done")


def _call_of(case: Case, first: Any, second: Any, workspace: overlap.Workspace) -> Any:
    more = {"return_gathered": True} if case.operator == "all_gather_matmul" else {}
    found = getattr(overlap, case.operator)(first, second, workspace, **more)
    if not more:
        return found
    y, gathered = found
    return (y, *gathered) if isinstance(gathered, tuple) else (y, gathered)


def _defaults(rank: int, group: Any) -> list[tuple[str, list[tuple[str, float]], str]]:
    """Each case measured, repeated, and in a graph; return what the measurements were."""
    ranks = group.size()
    with overlap.Workspace(nccl_group(), NBYTES, backend="lsa", timeout_s=60.0) as workspace:
        for case in exact_cases(ranks):
            mine = case.inputs(rank, 0, "cuda")
            all_of = [case.inputs(of, 0, "cuda") for of in range(ranks)]
            wanted = case.wanted(rank, all_of)
            call = partial(_call_of, case, *mine, workspace)
            before = len(workspace.choices)
            assert all(same(call(), wanted) for _ in range(3)), case
            assert len(workspace.choices) <= before + 1, case
            assert all(torch.equal(of, new) for of, new in zip(tensors(mine), tensors(all_of[rank]), strict=True))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = [call() for _ in range(2)]
            for _ in range(TURNS):
                graph.replay()
                workspace.check()
                assert all(same(found, wanted) for found in results), case
        return [(choice.operator, sorted(choice.us.items()), choice.form) for choice in workspace.choices]


@pytest.mark.gpu2
@pytest.mark.timeout(240)
def test_the_default_is_measured_and_the_same_on_all_ranks(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _defaults)
    found = gpu_ranks.results(count, timeout_s=220)
    assert all(of == found[0] for of in found.values()), found
    assert {operator for operator, _, _ in found[0]} == {case.operator for case in cases(count)}
    for operator, us, form in found[0]:
        times = dict(us)
        assert {"fused", "collectives"} <= times.keys() and min(times.values()) > 0, operator
        assert times[form] <= 1.02 * min(times.values()), (operator, times)


def _until_a_rank_dies(rank: int, group: Any) -> Any:
    """Rank 1 ends in its first collective of a measurement, for which the GPUs of the others wait without an end."""
    theirs = nccl_group()
    dist.all_reduce(torch.ones(1, device="cuda"), group=theirs)  # it connects the ranks, which waits for all of them
    workspace = overlap.Workspace(theirs, NBYTES, backend="lsa", timeout_s=60.0)
    executors = workspace.executors
    assert isinstance(executors, GpuExecutors) and executors._collectives is not None
    if rank == 1:
        executors._collectives._run = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    x = torch.ones(128, 256, dtype=torch.bfloat16, device="cuda")
    started = time.monotonic()
    try:
        overlap.all_gather_matmul(x, x, workspace)
    except moecomm.PeerLost as error:
        return error.peer, error.rank, time.monotonic() - started
    return None


@pytest.mark.gpu2
@pytest.mark.timeout(150)
def test_survivors_name_a_rank_that_is_killed_in_a_measurement(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _until_a_rank_dies)
    for rank, (peer, noticed_by, seconds) in gpu_ranks.results(count - 1, timeout_s=120).items():
        assert (peer, noticed_by) == (1, rank) and seconds < ROOM_S


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
