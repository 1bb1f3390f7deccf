"""Overlap with a matmul: its speed on multiprocessors that rounds leave free, and the time it hides in a dispatch."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.backends.lsa_kernels import cluster
from moecomm.buffer import Buffer
from moecomm.gpu import plain_kernel
from moecomm_bench import kernels
from moecomm_bench.clock import Call, Clock, device_us

SIZE = 8192  # of a square bf16 matmul
_MATMULS = 20  # timed together
_OTHERS_BEGIN = 1_000_000  # cycles after which work on another stream is running
_WARM_UP, _ROUNDS_TIMED = 15, 5  # in groups of _MATMULS: until a cold GPU's clock has settled, and the timed ones
_COLUMNS, _TFLOPS = 4096, 400.0  # of the matmul between halves, and its approximate speed


class _HoldArgs(ctypes.Structure):
    """HoldArgs of csrc/bench/sleep.cuh."""

    _fields_ = (("ns", ctypes.c_uint64),)


def measure(group: dist.ProcessGroup, call: Callable[[], Any], sms: int, us: float) -> dict[str, Any]:
    """Measure matmuls on all multiprocessors but `sms`, alone and next to rounds.

    Measurements alternate, because a GPU under sustained load runs at another clock rate than one that was idle;
    figures are medians.

    Args:
        group: the ranks.
        call: a round on `sms` multiprocessors.
        sms: multiprocessors of the round.
        us: microseconds of the round alone.

    Returns:
        {gemm_tflops, kept, held}: `gemm_tflops` alone; `kept`, the fraction of speed next to running rounds; `held`,
        the fraction next to blocks that occupy as many multiprocessors for as long, in equal clusters, and do nothing,
        so 1 - held is lost to the placement of the matmul. {why} where torch cannot limit matmuls to some
        multiprocessors.
    """
    limit = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if limit is None:
        return {"why": "this torch can't limit a matmul to some multiprocessors"}
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # respects the limit
    limit(sms)
    try:
        alone = [_milliseconds(group, a, b, out, None) for _ in range(_WARM_UP)][-1]
        # Twice as long as the matmuls. Equal on every rank, because each round waits for all ranks.
        rounds = torch.tensor(max(1, int(2 * alone * _MATMULS * 1e3 / us)))
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
        replay, hold = _captured(call, int(rounds)), _captured(holding(sms, us), int(rounds))
        time = partial(_milliseconds, group, a, b, out)
        turns = [(time(None), time(hold), time(replay)) for _ in range(_ROUNDS_TIMED)]
    finally:
        limit(None)
        torch.backends.cuda.preferred_blas_library(library)
    work = 2 * SIZE**3 / 1e9
    return {
        "gemm_tflops": work / statistics.median(alone for alone, _, _ in turns),
        "kept": statistics.median(alone / beside for alone, _, beside in turns),
        "held": statistics.median(alone / beside for alone, beside, _ in turns),
    }


def halves(clock: Clock, buffer: Buffer, given: dict[str, Any], us: float) -> dict[str, list[float]]:
    """Time a dispatch in halves with a matmul between them, in microseconds by replay.

    `given` holds the arguments of a dispatch that takes `us` microseconds; on an H200 the matmul takes about as long.
    Returns {halves, gemm, together}: dispatch_begin then dispatch_end; the matmul; the matmul between both halves.
    """
    given = {name: value for name, value in given.items() if name != "sync"}
    x = given["x"]
    rows = -(-int(us * _TFLOPS * 1e6 / (2 * _COLUMNS**2)) // 128) * 128 if x.is_cuda else 16
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    a, b = (torch.randn(n, _COLUMNS, device=x.device, dtype=dtype) for n in (rows, _COLUMNS))
    out = torch.empty_like(a)

    def matmul() -> None:
        torch.matmul(a, b, out=out)

    def split(between: Callable[[], None] | None = None) -> None:
        routed = buffer.dispatch_begin(**given)
        if between is not None:
            between()
        buffer.dispatch_end(routed, sync=False)

    calls: dict[str, Call] = {"halves": split, "gemm": matmul, "together": partial(split, matmul)}
    return clock.alternately(calls, meet=split)


def _milliseconds(
    group: dist.ProcessGroup,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    begin_others: Callable[[], None] | None,
) -> float:
    """Return the milliseconds of one matmul, next to the work that `begin_others` enqueues on another stream."""

    def matmuls() -> None:
        for _ in range(_MATMULS):
            torch.matmul(a, b, out=out)

    torch.cuda.synchronize()
    dist.barrier(group)
    if begin_others is not None:
        begin_others()
    return device_us(matmuls, _OTHERS_BEGIN) / 1e3 / _MATMULS


def holding(sms: int, us: float) -> Callable[[], None]:
    """Return a call that occupies `sms` multiprocessors for `us` microseconds."""
    kernel = kernels.HOLD[cluster(sms, torch.cuda.get_device_properties().multi_processor_count)]
    return partial(plain_kernel.launch, kernel, sms, _HoldArgs(ns=int(us * 1e3)))


_ROUNDS_OF_A_GRAPH = 50


def _captured(call: Callable[[], Any], rounds: int) -> Callable[[], None]:
    """Return a call that enqueues about `rounds` calls on a stream of high priority."""
    stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_ROUNDS_OF_A_GRAPH):
            call()

    def begin() -> None:
        with torch.cuda.stream(stream):
            for _ in range(-(-rounds // _ROUNDS_OF_A_GRAPH)):
                graph.replay()

    return begin
