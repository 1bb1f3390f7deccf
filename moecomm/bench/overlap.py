"""A matmul beside rounds: what of its speed is left on the multiprocessors that the rounds do not use; and one between
the halves of a dispatch: what of the dispatch it hides.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.backends.lsa import cluster
from moecomm.bench import kernels
from moecomm.bench.clock import Call, Clock, device_us
from moecomm.buffer import Buffer
from moecomm.jit import plain_kernel

SIZE = 8192  # of a square bf16 matmul
_MATMULS = 20  # timed together
_OTHERS_BEGIN = 1_000_000  # cycles after which what was enqueued before is running
_WARM_UP, _ROUNDS_TIMED = 15, 5  # of so many matmuls: until the clock of a cold GPU has come down, and those that count
_COLUMNS, _TFLOPS = 4096, 400.0  # of the matmul between halves, and about how fast it is


class _HoldArgs(ctypes.Structure):
    """HoldArgs of csrc/bench/hold.cuh."""

    _fields_ = (("ns", ctypes.c_uint64),)


def measure(group: dist.ProcessGroup, call: Callable[[], Any], sms: int, us: float) -> dict[str, Any]:
    """{gemm_tflops, kept, held}: matmuls on all multiprocessors but `sms`, and what of their speed is left.

    `kept`: beside running rounds.  `held`: beside rounds of blocks that hold as many multiprocessors for as long, lie
    as theirs and do nothing: the rest is lost because of where the matmuls run.  Alone and beside take turns, because
    a GPU that has been at work for a while runs at another clock than one that has not: medians.  `call`: a round on
    `sms` multiprocessors that takes `us` microseconds alone.  {why} where torch can't limit matmuls.
    """
    limit = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if limit is None:
        return {"why": "this torch can't limit a matmul to some multiprocessors"}
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # which heeds the limit
    limit(sms)
    try:
        alone = [_milliseconds(group, a, b, out, None) for _ in range(_WARM_UP)][-1]
        # Twice as long as the matmuls.  The same on every rank, or some would wait for others in vain.
        rounds = torch.tensor(max(1, int(2 * alone * _MATMULS * 1e3 / us)))
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
        replay, hold = _captured(call, int(rounds)), _captured(_holding(sms, us), int(rounds))
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
    """Microseconds by replay: {halves, gemm, together}: dispatch_begin and dispatch_end one after the other, a matmul,
    and the matmul between the halves.

    `given`: arguments of a dispatch, which takes `us` microseconds, and so does the matmul, about, on an H200.
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
    """Of one matmul, beside what `begin_others` enqueues on a stream of its own."""

    def matmuls() -> None:
        for _ in range(_MATMULS):
            torch.matmul(a, b, out=out)

    torch.cuda.synchronize()
    dist.barrier(group)
    if begin_others is not None:
        begin_others()
    return device_us(matmuls, _OTHERS_BEGIN) / 1e3 / _MATMULS


def _holding(sms: int, us: float) -> Callable[[], None]:
    """Holds so many multiprocessors for so long."""
    kernel = kernels.HOLD[cluster(sms, torch.cuda.get_device_properties().multi_processor_count)]
    return partial(plain_kernel.launch, kernel, sms, _HoldArgs(ns=int(us * 1e3)))


_ROUNDS_OF_A_GRAPH = 50


def _captured(call: Callable[[], Any], rounds: int) -> Callable[[], None]:
    """Enqueues about `rounds` of it on a stream that comes first."""
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
