"""Checks of every compiled kernel: within registers, with nothing spilled, and with its memory named."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

import pytest

from moecomm.gpu import jit, plain_kernel
from moecomm.gpu.cubin import lacks_descriptor
from moecomm.gpu.plain_kernel import PlainKernel

Kernel = PlainKernel | jit.KernelSpec


class Compiled(NamedTuple):
    """Result of a compilation."""

    cubin: bytes
    log: str  # of ptxas
    functions: list[str] | None  # their instructions, if something here reads them


_compiling: dict[Kernel, Future[Compiled]] = {}
_pool: ProcessPoolExecutor

_DESCRIPTOR = "c[0x0][0x208]"  # where sm_90 finds what its accesses to memory go through
_THROUGH = re.compile(r"\b(LD|LDG|ST|STG|ATOM|ATOMG|REDG)\.[^;]*\bdesc\[")


@contextmanager
def compiling(kernels: Iterable[Kernel]) -> Iterator[None]:
    """Compile these beside other tests, for the session.  What is not begun at its end is dropped."""
    global _pool
    # Other tests have deadlines.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), os.nice, (10,)) as _pool:
        for kernel in kernels:
            compile_beside(kernel)
        yield
        _pool.shutdown(cancel_futures=True)


def compile_beside(kernel: Kernel) -> Future[Compiled]:
    """Each is compiled once."""
    if kernel not in _compiling:
        _compiling[kernel] = _pool.submit(compile_kernel, kernel)
    return _compiling[kernel]


def compile_kernel(kernel: Kernel) -> Compiled:
    """Its cubin, ptxas's log and, where nvdisasm is installed, its instructions."""
    return looked_at(*(jit.build(kernel) if isinstance(kernel, jit.KernelSpec) else plain_kernel.build(kernel)))


def looked_at(cubin: bytes, log: str) -> Compiled:
    """With its instructions."""
    program = _nvdisasm()
    if program is None:
        return Compiled(cubin, log, None)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words: str = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return Compiled(cubin, log, words.split(".text.")[1:])


def check_kernel(kernel: PlainKernel, *, calls: bool = False, awaits: str = "") -> None:
    """Also that it fits into shared memory.  `awaits`: it is launched while the one before it ends, and awaits that
    "first", ahead of all that it reads and writes, arguments and shared memory apart, or "last".
    """
    pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    assert kernel.shared_bytes <= 227 * 1024
    compiled = compile_beside(kernel).result()
    assert b"moecomm_plain" in compiled.cubin
    check_compiled(compiled, kernel.threads, calls=calls)
    if awaits:
        check_awaits(compiled, awaits)


def check_compiled(compiled: Compiled, threads: int, *, calls: bool = False) -> None:
    """`threads`: of a block, or of the blocks of a multiprocessor; `calls`: it has a function that is called."""
    assert compiled.cubin.startswith(b"\x7fELF")
    registers = max(map(int, re.findall(r"Used (\d+) registers", compiled.log)))  # of all kernels of a file
    assert registers * threads <= 65536  # with which a block begins, before its warps share them out anew
    assert {*re.findall(r"(\d+) bytes spill", compiled.log)} == {"0"}
    assert {*re.findall(r"(\d+) bytes stack frame", compiled.log)} == {"0"} or calls
    assert "warning" not in compiled.log
    assert "C7515" not in compiled.log  # products that wait for one another
    check_memory_descriptor(compiled)


def check_memory_descriptor(compiled: Compiled) -> None:
    """ptxas 13.0 was seen to leave it out: accesses then go through whatever a register holds, and a GPU calls that an
    illegal instruction, now and then.
    """
    functions, cubin = functions_of(compiled), compiled.cubin
    for function in functions:
        assert ("desc[" in function) <= (_DESCRIPTOR in function), function.partition("\n")[0]
    assert not lacks_descriptor(cubin)
    assert lacks_descriptor(_without_descriptor(cubin)) == any(_THROUGH.search(f) for f in functions)


def _without_descriptor(cubin: bytes) -> bytes:
    """With loads of another constant in the place of its."""
    return cubin.replace(b"\x00\x82\x00\x00", b"\x00\x8f\x00\x00")


def check_awaits(compiled: Compiled, when: str) -> None:
    """See check_kernel."""
    names = "moecomm_plain:", "moecomm_dispatch:"
    (entry,) = (function for function in functions_of(compiled) if function.startswith(names))
    before, awaits, _ = entry.partition("ACQBULK")
    assert awaits and ("desc[" if when == "first" else " EXIT ") not in before


def functions_of(compiled: Compiled) -> list[str]:
    """Its functions.  Skips where nothing reads them."""
    if compiled.functions is None:
        pytest.skip("instructions are looked at through nvdisasm: pip install nvidia-cuda-nvdisasm")
    return compiled.functions


@lru_cache(maxsize=1)
def _nvdisasm() -> str | None:
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return shutil.which("nvdisasm")
    return next(str(file.locate()) for file in files if file.name == "nvdisasm")
