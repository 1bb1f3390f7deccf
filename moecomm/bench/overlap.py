"""A matmul beside rounds: what of its speed is left on the multiprocessors that the rounds do not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZE = 8192  # of a square bf16 matmul
_MATMULS = 20


def measure(group: dist.ProcessGroup, call: Callable[[], Any], sms: int, us: float) -> dict[str, Any]:
    """{gemm_tflops, gemm_tflops_beside}: matmuls on all multiprocessors but `sms`, alone and beside running rounds.

    `call`: a round on `sms` multiprocessors that takes `us` microseconds alone.  {why} where torch can't limit matmuls.
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
        for _ in range(3):
            torch.matmul(a, b, out=out)
        alone = _milliseconds(group, a, b, out, None, 0)
        # Twice as long as the matmuls.  The same on every rank, or some would wait for others in vain.
        rounds = torch.tensor(max(1, int(2 * alone * _MATMULS * 1e3 / us)))
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=group)
        beside = _milliseconds(group, a, b, out, call, int(rounds))
    finally:
        limit(None)
        torch.backends.cuda.preferred_blas_library(library)
    work = 2 * SIZE**3 / 1e9
    return {"gemm_tflops": work / alone, "gemm_tflops_beside": work / beside}


def _milliseconds(
    group: dist.ProcessGroup,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    call: Callable[[], Any] | None,
    rounds: int,
) -> float:
    """Of one matmul; with `call`, while `rounds` of it run on a stream of their own."""
    rounds_stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    graph = _captured(call, rounds_stream) if call is not None else None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    dist.barrier(group)
    if graph is not None:
        with torch.cuda.stream(rounds_stream):
            for _ in range(-(-rounds // _ROUNDS_OF_A_GRAPH)):
                graph.replay()
    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]  # the rounds are running by then
    begin.record()
    for _ in range(_MATMULS):
        torch.matmul(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / _MATMULS


_ROUNDS_OF_A_GRAPH = 50


def _captured(call: Callable[[], Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_ROUNDS_OF_A_GRAPH):
            call()
    return graph
