"""Parts that tests of experts on GPUs share: kernels compiled before they are wanted, and layers of several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from moecomm.fused import Fp8
from moecomm.gpu import plain_kernel
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.testing import LayerCase, LocalBuffers


def compile_all(kernels: Iterable[PlainKernel]) -> None:
    """Into the cache, on all cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(plain_kernel.compile, kernels, itertools.repeat("sm_90a")))


def checked(ranks: LocalBuffers, case: LayerCase, calls: list[dict[str, Any]]) -> list[Any]:
    """Return what a layer gives on each rank, after a check of its values."""
    outs = ranks.moe(calls)
    ranks.check()
    for rank, out in enumerate(outs):
        case.check(rank, out)
    return outs


def check_replays(ranks: LocalBuffers, cases: list[LayerCase], given: list[dict[str, Any]]) -> None:
    """A layer of `given`, which is the first of the cases, is captured on each rank, and replayed with all of them."""
    ranks.moe(given)  # compiles
    torch.cuda.synchronize()
    graphs, outs = [], []
    for buffer, mine, stream in zip(ranks.buffers, given, ranks.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(buffer.moe(**mine))
        graphs.append(graph)
    for case in cases:
        for rank, mine in enumerate(given):
            copy_into(mine, case.call(rank, "cuda"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        ranks.check()
        for rank, out in enumerate(outs):
            case.check(rank, out)


def copy_into(mine: dict[str, Any], call: dict[str, Any]) -> None:
    """The tensors of another call to where those of this one are."""
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            mine[name].copy_(value)
        elif isinstance(value, Fp8):
            for to, part in zip(mine[name], value, strict=True):
                to.copy_(part)
