"""python -m tests.gpu.compile_rounds RANKS TRANSPORT...: kernels of `moecomm bench dispatch-combine`, by all cores.

TRANSPORT is lsa (one domain), or what reaches domains of half of the ranks: puts, nic, gin_proxy, nvshmem.  Ranks that
compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from moecomm import jit
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.router import MODELS
from moecomm.testing.prepare import prepare_combine, prepare_dispatch
from tests.device.test_kernels_of_gpu_tests import on_a_gpu
from tests.gpu.compile_models import opened

TOKENS = (1, 128, 4096)
LAYOUTS, PAYLOADS, WIRES = ("flat", "expert", "batched"), ({}, {"quantize": "fp8"}), (None, "exact")


def kernels(ranks: int, transport: str, tokens: int) -> Iterator[jit.KernelSpec]:
    """Dispatches and combines of DeepSeek-V3, as ranks of GPUs prepare them."""
    model = MODELS["deepseek-v3"]
    where = {} if transport == "lsa" else {"domain_ranks": ranks // 2}
    with opened(model, ranks, tokens, **where) as buffer:
        ids, weights = torch.full((tokens, model.topk), -1), torch.zeros(tokens, model.topk)
        x = torch.zeros(tokens, model.hidden, dtype=torch.bfloat16)
        for layout, payload in itertools.product(LAYOUTS, PAYLOADS):
            routed = prepare_dispatch(buffer, x, ids, weights, layout=layout, max_rows=64, **payload)
            yield _through(on_a_gpu(routed.args, layout), transport)
            if payload:
                continue
            ys = torch.empty(routed.handle.y_shape, dtype=torch.bfloat16), buffer.empty(routed.handle)
            for y, wire in itertools.product(ys, WIRES):
                yield _through(combine_spec(prepare_combine(buffer, y, routed.handle, wire=wire).args), transport)


def _through(spec: jit.KernelSpec, transport: str) -> jit.KernelSpec:
    return spec if spec.transport == "lsa" else replace(spec, transport=transport)


def main(ranks: int, transports: Iterable[str]) -> None:
    """Compile all, and print their number and the time."""
    begin = time.monotonic()
    found = {spec for way, tokens in itertools.product(transports, TOKENS) for spec in kernels(ranks, way, tokens)}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(jit.compile, found))
    print(f"{len(found)} kernels in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
