"""python -m tests.gpu.compile_overlap RANKS: what test_overlap.py and `moecomm bench overlap` launch, by all cores.

Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch

import moecomm
from moecomm.fused import FP8_SCHEDULES, SCHEDULES, tensor_maps
from moecomm.gpu.plain_kernel import PlainKernel, compile  # noqa: A004
from moecomm.gpu.structs import struct
from moecomm.overlap.gpu import SUMMED, GpuExecutor
from moecomm.window.gpu_calls import kernel
from moecomm_bench import operator_cases
from tests.backends.conftest import run_ranks
from tests.gpu.overlap_cases import cases, exact_cases

_WINDOW_BYTES = 2 << 30  # of address space: nothing is written


def kernels(ranks: int, units: int = 132, every: bool = False) -> Iterator[PlainKernel]:
    """Kernels that ranks with `units` multiprocessors launch; `every`: with every schedule, too."""
    found: list[PlainKernel] = []
    windows = run_ranks(ranks, lambda group: moecomm.Window(group, _WINDOW_BYTES, backend="host"))
    try:
        executor = GpuExecutor(windows[0])
        executor._units = units
        with (
            patch.object(tensor_maps, "encode", lambda *_: struct("TensorMap")()),
            patch.object(executor, "_launch", lambda kernel, blocks, args: found.append(kernel)),
        ):
            for case in (*cases(ranks), *exact_cases(ranks)):
                case.call(executor, *case.empty())
            for dtype in SUMMED:
                executor.all_reduce(torch.empty(8, dtype=dtype))
            for operator in operator_cases.OPERATORS:
                for sized in operator_cases.cases(operator, ranks):
                    more = {"all_gather_matmul": (False,), "embedding_all_to_all": (None,)}.get(operator, ())
                    names = FP8_SCHEDULES if sized.dtype == "fp8" else SCHEDULES
                    for executor.schedule in (None, *(names if every else ())):
                        getattr(executor, operator)(*sized.empty(), *more)
    finally:
        for window in windows:
            window.close()
    yield from found
    yield from (kernel(call) for call in ("signal", "set_signal", "wait", "barrier"))


def build(kernel: PlainKernel) -> None:
    """Into the cache."""
    compile(kernel, "sm_90a")


def main(ranks: int) -> None:
    """Compile all, and print their number and the time."""
    begin = time.monotonic()
    virtual = {found for count in (1, 2, 4) for found in kernels(count, 132 // count)}
    found = {*virtual, *kernels(ranks, every=True)}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(build, found))
    print(f"{len(found)} kernels in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))
