"""Every kernel that the random cases on GPUs launch compiles for sm_90a, here, without a GPU."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecomm import _native, combine, dispatch, jit, packets, tuning
from moecomm.backends import host
from moecomm.backends.lsa_kernels import combine_spec, dispatch_spec
from moecomm.dispatch.plan import END
from moecomm.testing import LocalBuffers, random_case
from moecomm.testing.check import dispatch_call

from ..gpu import test_nvlink, test_virtual_ranks

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

SIZES = [
    *test_virtual_ranks.SIZES,
    test_virtual_ranks.PAIR,
    test_virtual_ranks.LONG,
    *({"ranks": 4, "dtype": torch.bfloat16, **sizes} for sizes in (*test_nvlink.SIZES, test_nvlink.SMALL)),
]
CASES = 250  # enough to meet every kind of case
MOST = 34  # kernels of a set of sizes


def kernels_of(sizes: dict[str, Any]) -> set[jit.KernelSpec]:
    """What the first cases of these sizes launch: prepared as for a GPU, on the CPU, and not run."""
    specs = set()
    virtual = sizes in (*test_virtual_ranks.SIZES, test_virtual_ranks.LONG)
    room = test_virtual_ranks.packet_room(sizes) if virtual else packets.room
    with patch.object(host, "packet_bytes", room), LocalBuffers(**sizes, backend="host") as ranks:
        buffer = ranks.buffers[0]
        buffer.session.pulls_flat_rows = True  # type: ignore[misc]

        def on_a_gpu(args: _native.DispatchArgs, layout: str) -> jit.KernelSpec:
            choice = tuning.choose("", sizes["ranks"], "dispatch", layout, args.num_tokens)
            args.chunk_tokens = choice.chunk_tokens
            return dispatch_spec(args)

        for seed in range(CASES):
            case = random_case(seed, **sizes, few_kernels=True)
            call = dispatch_call(case, 0, buffer.device)
            routed = dispatch.prepare(buffer, **call)
            specs.add(on_a_gpu(routed.args, case.layout))
            if case.begin:
                half = dispatch.prepare(buffer, **call, begin=True).args
                specs.add(on_a_gpu(half, case.layout))
                half.part = END
                specs.add(on_a_gpu(half, case.layout))
            handle = routed.handle
            y = torch.empty(handle.y_shape, dtype=buffer.dtype)
            if case.in_window:
                y = buffer.empty(handle)
            grads = None
            if case.weight_grads:
                grads = torch.empty(*handle.y_shape[:-1], *((buffer.topk,) if case.layout == "flat" else ()))
            brought = combine.prepare(buffer, y, handle, weighted=case.weighted, wire=case.wire, weight_grads=grads)
            specs.add(combine_spec(brought.args))
    assert len(specs) <= MOST, "a GPU has not that much time"
    return specs


def compile_one(spec: jit.KernelSpec) -> tuple[jit.KernelSpec, int]:
    return spec, len(jit.build(spec)[0])


@pytest.mark.timeout(900)
def test_every_kernel_compiles() -> None:
    specs = sorted(set().union(*map(kernels_of, SIZES)), key=repr)
    assert len(specs) > 10 * len(SIZES), "cases of every kind were met"
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for spec, nbytes in pool.map(compile_one, specs):
            assert nbytes > 10_000, spec
