"""Rounds of LocalBuffers(backend="host") by the kernels of GPUs, compiled with g++ and run by scheduler.cpp."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moecomm import _native
from moecomm.backends import emulated_nic
from moecomm.backends.lsa_kernels import Choice, choice_of, combine_spec, dispatch_spec
from moecomm.gpu import jit
from moecomm.gpu.plain_kernel import PlainKernel

from . import plain
from .units import CSRC, Units, scheduler

LIMIT = 100_000  # passes over all threads: a round takes a few thousand
_OFFSETS = """
#include <cstddef>
#include <cstdio>
#include "protocol/args.h"
using namespace moecomm;
int main() { std::printf("%zu %zu %zu", sizeof(DispatchArgs), sizeof(CombineArgs), offsetof(Context, link)); }
"""
Arguments = _native.DispatchArgs | _native.CombineArgs


class Launch(ctypes.Structure):
    """Launch of scheduler.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("blocks", "threads", "shared_bytes", "after", "early")),
    )


class Call:
    """The arguments of one rank's round as they are now, and the kernel that they want.

    `ahead`: the one that a dispatch wants ahead of it, which chooses slots.
    """

    def __init__(self, args: Arguments, sizes: dict[str, int], ahead: Choice | None = None) -> None:
        self.ahead = ahead
        self.spec = dispatch_spec(args) if isinstance(args, _native.DispatchArgs) else combine_spec(args)
        # Behind the head of an object pybind11 has the address of its value.
        address = ctypes.c_void_p.from_address(id(args) + 16).value
        self.content = ctypes.string_at(address, sizes[self.spec.op])
        self.peers, self.num_tokens = args.ctx.peers[: args.ctx.shape.ranks], args.num_tokens


@lru_cache
def units(counted: bool = False) -> Units:
    """Once a process."""
    return Units(plain.write, "cuda.h", counted)


@lru_cache
def offsets() -> tuple[int, int, int]:
    """Bytes of DispatchArgs and CombineArgs, and where Context has its link."""
    with TemporaryDirectory() as directory:
        source, program = Path(directory) / "offsets.cpp", Path(directory) / "offsets"
        source.write_text(_OFFSETS)
        subprocess.run(["g++", "-std=c++17", f"-I{CSRC}", source, "-o", program], check=True)
        dispatch, combine, link = map(int, subprocess.run([program], check=True, capture_output=True).stdout.split())
    return dispatch, combine, link


class Machine:
    """Compiles kernels, each once, and runs them.

    Args:
        blocks: of each kernel; None: one to three.
        counted: count what threads do, see steps().
    """

    def __init__(self, blocks: int | None = None, counted: bool = False) -> None:
        self.scheduler, self.library, self._blocks = scheduler(), units(counted).library, blocks
        dispatch, combine, self._link = offsets()
        self.sizes = {"dispatch": dispatch, "combine": combine}
        self._kernels: dict[jit.KernelSpec | Choice, Any] = {}
        self._runs = 0
        self.nic: emulated_nic.Nic | None = None  # between domains
        self.transport = "puts"  # between domains without a NIC
        self.links: list[torch.Tensor] = []  # by rank, of the last rounds: words at Context.link

    def run_all(self, args: Sequence[Arguments]) -> None:
        """In place of _native.host_run_all: a round of all ranks."""
        calls = [Call(a, self.sizes) for a in args]
        for one in args:
            if isinstance(one, _native.DispatchArgs) and (ahead := choice_of(one)) is not None:
                calls.insert(len(calls) - len(args), Call(one, self.sizes, ahead))
        self.run(calls, len(args))

    def in_chunks(self, chunk_tokens: int) -> Callable[[Sequence[Arguments]], None]:
        """Return run_all for rounds in chunks of so many tokens."""

        def run(args: Sequence[Arguments]) -> None:
            for one in args:
                one.chunk_tokens = chunk_tokens
            self.run_all(args)

        return run

    def run(self, calls: Sequence[Call], ranks: int) -> None:
        """Rounds of all ranks: that of a rank begins when the one `ranks` before has ended there, and not elsewhere.

        AssertionError if they do not end.
        """
        self._runs += 1
        rng = random.Random(self._runs)
        for call in calls:
            if call.spec.domain_ranks:
                call.spec = replace(call.spec, transport=self.transport if self.nic is None else "nic")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            wanted = {call.ahead or call.spec for call in calls}
            kernels = dict(zip(wanted, pool.map(self._kernel, wanted), strict=True))
        windows = [
            max(found) for found in zip(*(call.peers for call in calls[:ranks]), strict=True)
        ]  # 0: all are masked
        self.scheduler.emulator_windows((ctypes.c_uint64 * len(windows))(*windows), len(windows))
        self.links = [emulated_nic.link(self.nic, windows, torch.device("cpu")) for _ in calls]
        launches, contents = (Launch * len(calls))(), []
        for nth, call in enumerate(calls):
            contents.append(content := ctypes.create_string_buffer(call.content, len(call.content)))
            if call.spec.domain_ranks:
                ctypes.c_uint64.from_buffer(content, self._link).value = self.links[nth].data_ptr()
            fields = jit.block_fields(call.spec)
            block = jit.block_threads(fields), fields["shared_bytes"]
            if call.ahead is not None:
                block = call.ahead.threads, call.ahead.shared_bytes
            launches[nth] = Launch(
                ctypes.cast(kernels[call.ahead or call.spec].kernel, ctypes.c_void_p).value,
                ctypes.addressof(content),
                self._blocks or rng.choice([1, 2, 3]),
                *block,
                nth - ranks if nth >= ranks else -1,
            )
        ended = self.scheduler.emulator_run(ctypes.addressof(launches), len(calls), LIMIT, self._runs)
        assert ended == 0, f"{calls[0].spec.op} of {[call.num_tokens for call in calls]} tokens does not end"

    def steps(self, rank: int) -> tuple[int, int]:
        """Return basic blocks of the last round that a thread of a rank ran at most, and all threads of a block."""
        return self.scheduler.emulator_steps(rank), self.scheduler.emulator_block_steps(rank)

    def puts(self, rank: int, peer: int) -> int:
        """How often `rank` has put to `peer`, of another domain, so far."""
        return int(self.scheduler.emulator_puts(rank, peer))

    def put_bytes(self, rank: int) -> int:
        """Bytes that `rank` has put so far."""
        return int(self.scheduler.emulator_put_bytes(rank))

    def lines(self, rank: int) -> int:
        """Lines of packets that `rank` has stored so far, those to itself included."""
        return int(self.scheduler.emulator_lines(rank))

    def slow_link(self, rank: int, peer: int, byte_passes: int) -> None:
        """Let each byte that `rank` puts to `peer`, of another domain, take so many passes from now on; 0: no time."""
        self.scheduler.emulator_slow_link(rank, peer, byte_passes)

    def now(self) -> int:
        """The nanoseconds of the machine's clock."""
        return 1000 * int(self.scheduler.emulator_passes())

    def forget(self) -> None:
        """Before windows go away: nothing is put there any more."""
        self.scheduler.emulator_forget()

    def _kernel(self, spec: jit.KernelSpec | Choice) -> Any:
        if spec not in self._kernels:
            self._kernels[spec] = self.library(_unit(spec))
        return self._kernels[spec]


def plain_unit(kernel: PlainKernel) -> str:
    """The translation unit of a plain kernel with an entry that any thread calls."""
    head = kernel.source.split('extern "C"', 1)[0]
    call = f"{kernel.entry}(*static_cast<const {kernel.args}*>(args));"
    return f'#include "cuda.h"\n{head}extern "C" void kernel(const void* args) {{ {call} }}\n'


def _unit(spec: jit.KernelSpec | Choice) -> str:
    """The translation unit of jit.source with an entry that any thread calls."""
    if isinstance(spec, Choice):
        return plain_unit(spec)
    head, kernel = jit.source(spec).split('extern "C"', 1)
    call = re.search(r"\{ (\w+<config, \w+>)\(args\); \}", kernel)
    assert call is not None
    args = f"{spec.op.capitalize()}Args"
    return (
        f'#include "cuda.h"\n{head}'
        f'extern "C" void kernel(const void* args) {{ {call[1]}(*static_cast<const {args}*>(args)); }}\n'
    )
