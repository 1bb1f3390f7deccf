"""python -m tests.gpu.compile_verified: compile the kernels that test_verify.py launches, on all cores.

Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from moecomm import _native
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.gpu import jit
from moecomm.testing import LocalBuffers
from tests.device import test_kernels_of_gpu_tests as kernels
from tests.gpu import test_verify
from tests.gpu.compile_rounds import compile_all, of_rounds

TOKENS = 30


def verifying(args: _native.CombineArgs) -> jit.KernelSpec:
    """Return the kernel of a combine that is verified: hashes have places, and rows go through the ring."""
    args.staged_hashes = args.added_hashes = 1 << 8  # any address
    args.reduced_rows = 0
    return combine_spec(args)


def launched() -> set[jit.KernelSpec]:
    """Return what the random cases, and the tests that flip bits, launch."""
    found = set[jit.KernelSpec]()
    no_numbers = patch.object(torch, "randn", lambda *shape, generator: torch.zeros(shape))  # no kernel depends on them
    with no_numbers, patch.object(kernels, "combine_spec", verifying):
        for domain_ranks in test_verify.DOMAIN_RANKS:
            sizes = {"ranks": 4, "domain_ranks": domain_ranks, **test_verify.SIZES}
            found |= kernels.kernels_of(sizes, range(test_verify.CASES))
            with LocalBuffers(**sizes, backend="host") as ranks:
                ranks.buffers[0].rounds.session.casts_formats = True  # type: ignore[misc]
                found |= {*of_rounds(ranks.buffers[0], TOKENS, verifying)}
    return found


if __name__ == "__main__":
    compile_all(launched())
