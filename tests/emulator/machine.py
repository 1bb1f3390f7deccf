"""Rounds of LocalBuffers(backend="host") by the kernels of GPUs, compiled with g++ and run by scheduler.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moecomm import _native, jit
from moecomm.backends.lsa_kernels import combine_spec, dispatch_spec

from . import plain

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
FLAGS = ("-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC")
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
    """The arguments of one rank's round as they are now, and the kernel that they want."""

    def __init__(self, args: Arguments, sizes: dict[str, int]) -> None:
        self.spec = dispatch_spec(args) if isinstance(args, _native.DispatchArgs) else combine_spec(args)
        # What pybind11 has behind the head of an object is the address of its value.
        address = ctypes.c_void_p.from_address(id(args) + 16).value
        self.content = ctypes.string_at(address, sizes[self.spec.op])
        self.window, self.num_tokens = args.ctx.peers[args.ctx.rank], args.num_tokens


@lru_cache
def scheduler() -> ctypes.CDLL:
    """scheduler.cpp, once a process: kernels find its names, which must not be those of another one."""
    with TemporaryDirectory() as directory:
        library = Path(directory) / "scheduler.so"
        subprocess.run(["g++", *FLAGS[:1], "-O2", *FLAGS[-2:], HERE / "scheduler.cpp", "-o", library], check=True)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.emulator_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint]
    return loaded


class Machine:
    """Compiles kernels into `directory`, each once, and runs them."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._csrc = directory, directory / "csrc"
        plain.write(CSRC, self._csrc)
        self.scheduler = scheduler()
        (directory / "offsets.cpp").write_text(_OFFSETS)
        offsets = directory / "offsets"
        subprocess.run(["g++", "-std=c++17", f"-I{CSRC}", directory / "offsets.cpp", "-o", offsets], check=True)
        said = subprocess.run([offsets], check=True, capture_output=True, text=True).stdout.split()
        self.sizes = dict(zip(("dispatch", "combine"), map(int, said), strict=False))
        self._link = int(said[2])
        self._kernels: dict[jit.KernelSpec, Any] = {}
        self._runs = 0

    def run_all(self, args: Sequence[Arguments]) -> None:
        """In place of _native.host_run_all: a round of all ranks."""
        self.run([Call(a, self.sizes) for a in args], len(args))

    def run(self, calls: Sequence[Call], ranks: int) -> None:
        """Rounds of all ranks: that of a rank begins when the one `ranks` before has ended there, and not elsewhere.

        AssertionError if they do not end.
        """
        self._runs += 1
        rng = random.Random(self._runs)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            kernels = dict(zip(specs := {call.spec for call in calls}, pool.map(self._kernel, specs), strict=True))
        windows = (ctypes.c_uint64 * ranks)(*(call.window for call in calls[:ranks]))
        launches, contents = (Launch * len(calls))(), []
        for nth, call in enumerate(calls):
            contents.append(content := ctypes.create_string_buffer(call.content, len(call.content)))
            if call.spec.domain_ranks:  # what Puts wants
                ctypes.c_uint64.from_buffer(content, self._link).value = ctypes.addressof(windows)
            fields = jit.block_fields(call.spec)
            launches[nth] = Launch(
                ctypes.cast(kernels[call.spec].kernel, ctypes.c_void_p).value,
                ctypes.addressof(content),
                rng.choice([1, 2, 3]),
                jit.block_threads(fields),
                fields["shared_bytes"],
                nth - ranks if nth >= ranks else -1,
            )
        ended = self.scheduler.emulator_run(ctypes.addressof(launches), len(calls), LIMIT, self._runs)
        assert ended == 0, f"{calls[0].spec.op} of {[call.num_tokens for call in calls]} tokens does not end"

    def forget(self) -> None:
        """Before windows go away: nothing is put there any more."""
        self.scheduler.emulator_forget()

    def _kernel(self, spec: jit.KernelSpec) -> Any:
        if spec not in self._kernels:
            self._kernels[spec] = self.library(_unit(spec))
        return self._kernels[spec]

    def library(self, unit: str) -> Any:
        """A translation unit, compiled and loaded, each once."""
        source = self._directory / f"{hashlib.sha256(unit.encode()).hexdigest()[:20]}.cpp"
        library = source.with_suffix(".so")
        if not library.exists():
            source.write_text(unit)
            subprocess.run(["g++", *FLAGS, f"-I{HERE}", f"-I{self._csrc}", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def _unit(spec: jit.KernelSpec) -> str:
    """The translation unit of jit.source with an entry that any thread calls."""
    head, kernel = jit.source(spec).split('extern "C"', 1)
    call = re.search(r"\{ (\w+<config, \w+>)\(args\); \}", kernel)
    assert call is not None
    args = f"{spec.op.capitalize()}Args"
    return (
        f'#include "cuda.h"\n{head}'
        f'extern "C" void kernel(const void* args) {{ {call[1]}(*static_cast<const {args}*>(args)); }}\n'
    )
