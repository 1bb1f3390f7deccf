"""python -m tests.gpu.compile_models RANKS MODEL...: what `moecomm bench moe --fp8` launches, by all cores at once.

Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from moecomm.backends import host
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.base import packets
from moecomm.buffer import Buffer
from moecomm.dispatch import PublishedOffsets
from moecomm.fused import schedules
from moecomm.fused.compute import layer_kernel, rows_per_counter
from moecomm.fused.kernels import FP8, gemm_kernel, publish_kernel, reduce_kernel
from moecomm.gpu import jit, plain_kernel
from moecomm.router import MODELS, Model
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine, prepare_dispatch
from tests.device.test_kernels_of_gpu_tests import on_a_gpu

TOKENS = (16, 128, 512, 1024, 2048, 4096, 8192)
BF16, SMS = torch.bfloat16, 132
Kernel = plain_kernel.PlainKernel | jit.KernelSpec


def of_layers(model: Model, ranks: int, tokens: int) -> Iterator[Kernel]:
    """GEMMs, and the layers whose rows travel."""
    hidden, inner, local = model.hidden, model.intermediate, model.num_experts // ranks
    evenly = tokens * model.topk * ranks // model.num_experts
    yield reduce_kernel(BF16, hidden, model.topk)
    # The GEMMs alone expect as many rows as there are on the busiest rank.
    for dtype, rows in itertools.product((BF16, FP8), {max(1, evenly), max(1, evenly * 26 // 25)}):
        sizes = (2 * inner, hidden), (hidden, inner)
        first, second = (schedules.schedule_of(dtype, rows, local, *size, SMS) for size in sizes)
        both, counted = schedules.schedule_of_both(dtype, rows, inner), rows_per_counter(rows * local)
        yield gemm_kernel(dtype, True, True, first, out=dtype)
        yield gemm_kernel(dtype, False, False, second, out=BF16)
        yield publish_kernel(BF16, dtype, hidden)
        yield layer_kernel(dtype, True, both, hidden, BF16, counted)


def of_rounds(model: Model, ranks: int, tokens: int) -> Iterator[Kernel]:
    """Dispatches of rows, of rows that are cast, and of row descriptors; the combine."""
    with opened(model, ranks, tokens) as buffer:
        ids, weights = torch.full((tokens, model.topk), -1), torch.zeros(tokens, model.topk)
        x = torch.zeros(tokens, model.hidden, dtype=BF16)
        kinds: list[dict[str, Any]] = [
            {},
            {"quantize": "fp8"},
            {"descriptors": PublishedOffsets(0, 2 * model.hidden, 0)},
        ]
        for kind in kinds:
            routed = prepare_dispatch(buffer, x, ids, weights, layout="expert", max_rows=64, **kind)
            yield on_a_gpu(routed.args, "expert")
            if not kind:
                y = torch.empty(routed.handle.y_shape, dtype=BF16)
                yield combine_spec(prepare_combine(buffer, y, routed.handle).args)


@contextmanager
def opened(model: Model, ranks: int, tokens: int, **options: Any) -> Iterator[Buffer]:
    """One of the Buffers, which says of itself what one of GPUs does."""
    sizes = {"hidden": model.hidden, "num_experts": model.num_experts, "topk": model.topk, "max_tokens": tokens}
    with (
        patch.object(host, "packet_bytes", packets.room),
        LocalBuffers(ranks=ranks, **sizes, **options, dtype=BF16, backend="host") as buffers,
    ):
        buffer = buffers.buffers[0]
        buffer.rounds.session.casts_formats = True  # type: ignore[misc]
        buffer.rounds.session.reduced_rows_in_heap = buffer.rounds.domain_ranks == ranks  # type: ignore[misc]
        yield buffer


def build(kernel: Kernel) -> None:
    """Into the cache."""
    if isinstance(kernel, jit.KernelSpec):
        jit.compile(kernel)
    else:
        plain_kernel.compile(kernel, "sm_90a")


def main(ranks: int, models: Iterable[str]) -> None:
    """Says how many there were, and how long it took."""
    begin = time.monotonic()
    asked = list(itertools.product((MODELS[name] for name in models), (ranks,), TOKENS))
    kernels = {kernel for of in (of_layers, of_rounds) for sizes in asked for kernel in of(*sizes)}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(build, kernels))
    print(f"{len(kernels)} kernels in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
