"""python -m tests.gpu.compile_verified: compile the kernels that test_verify.py launches, on all cores.

Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from moecomm import _native, jit
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine, prepare_dispatch
from tests.device import test_kernels_of_gpu_tests as kernels
from tests.gpu import test_verify

LAYOUTS: tuple[Any, ...] = ("flat", "expert", "batched")
WIRES: tuple[Any, ...] = (None, "exact")
TOKENS = 30


def verifying(args: _native.CombineArgs) -> jit.KernelSpec:
    """Return the kernel of a combine that is verified: hashes have places, and rows go through the ring."""
    args.staged_hashes = args.added_hashes = 1 << 8  # any address
    args.reduced_rows = 0
    return combine_spec(args)


def of_flips(sizes: dict[str, Any]) -> Iterator[jit.KernelSpec]:
    """Yield the kernels of the tests that flip bits."""
    hidden, topk, dtype = sizes["hidden"], sizes["topk"], sizes["dtype"]
    with LocalBuffers(**sizes, backend="host") as ranks:
        buffer = ranks.buffers[0]
        x, ids = torch.zeros(TOKENS, hidden, dtype=dtype), torch.full((TOKENS, topk), -1)
        for layout, quantize in itertools.product(LAYOUTS, (None, "fp8")):
            routed = prepare_dispatch(buffer, x, ids, layout=layout, quantize=quantize, max_rows=64)
            yield kernels.on_a_gpu(routed.args, layout)
            if quantize:
                continue
            handle = routed.handle
            for y in (buffer.empty(handle, dtype), torch.empty(handle.y_shape, dtype=dtype)):
                for wire in WIRES:
                    yield verifying(prepare_combine(buffer, y, handle, wire=wire).args)


def main() -> None:
    """Compile all, and print their number and the time."""
    begin, found = time.monotonic(), set[jit.KernelSpec]()
    no_numbers = patch.object(torch, "randn", lambda *shape, generator: torch.zeros(shape))  # no kernel depends on them
    with no_numbers, patch.object(kernels, "combine_spec", verifying):
        for domain_ranks in test_verify.DOMAIN_RANKS:
            sizes = {"ranks": 4, "domain_ranks": domain_ranks, **test_verify.SIZES}
            found |= {*kernels.kernels_of(sizes, range(test_verify.CASES)), *of_flips(sizes)}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(jit.compile, found))
    print(f"{len(found)} kernels in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
