"""python -m tests.gpu.compile CASES [--ranks N] [--domains] [--processes]: what random cases launch, into the cache.

These are the cases of virtual ranks, and of so many GPUs (4) in one domain or in several, through every transport that
can be linked here; with --processes those of GPUs alone.  All cores compile.

Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch

from moecomm import shims
from moecomm.backends import gin
from moecomm.gpu import jit
from tests.device import test_kernels_of_gpu_tests as kernels


def known(*of: Any) -> set[jit.KernelSpec]:
    """Return what these cases launch.  No kernel depends on what is in a row."""
    torch.set_num_threads(1)
    torch.randn = lambda *shape, generator: torch.zeros(shape)  # type: ignore[assignment]
    return kernels.kernels_of(*of)


def through(spec: jit.KernelSpec) -> list[jit.KernelSpec]:
    """The kernels that are this one for some backend."""
    if spec.transport == "lsa":
        return [spec]
    names = (gin.wanted_shim(), "nvshmem")
    linked = [replace(spec, transport=name) for name in names if not shims.find(name).missing]
    return [spec, *linked]


def main(asked: Iterable[tuple[Any, ...]]) -> None:
    """Says how many there were, and how long it took."""
    begin = time.monotonic()
    compiling: dict[jit.KernelSpec, Future[bytes]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in as_completed([pool.submit(known, *of) for of in asked]):
            for spec in sorted({s for known in found.result() for s in through(known)} - compiling.keys(), key=repr):
                compiling[spec] = pool.submit(jit.compile, spec)
        for built in compiling.values():
            built.result()
    print(f"{len(compiling)} kernels in {time.monotonic() - begin:.0f} s")


def cases(given: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Yield sizes and cases that a command line asks for."""
    if given.processes:
        rounds = kernels.domains_of_processes if given.domains else kernels.rounds_of_processes
    else:
        rounds = kernels.rounds_of_domains if given.domains else kernels.rounds
        yield from kernels.cast_rounds(given.cases)
    yield from rounds(given.cases, given.ranks)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser("tests.gpu.compile", usage=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--domains", action="store_true")
    parser.add_argument("--processes", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    main(cases(parsed()))
