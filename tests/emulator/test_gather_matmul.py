"""The kernels of the all-gather study, compiled by g++, over Windows of CPU ranks that run at once."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.window.failures import error_of
from moecomm_bench import gather_kernels
from moecomm_bench.gather_kernels import GatherMatmul

from .machine import LIMIT, Launch, Machine
from .test_windows import windows

_CAST = re.compile(r'asm\("cvt\S*\.f32 [^;]*;" : "=h".*|asm\("cvt\.f32\.f16 [^;]*;" : "=f".*')
_CALL = """
template <class... P, unsigned long... at>
void call(void (*kernel)(P...), const unsigned long long* numbers, std::integer_sequence<unsigned long, at...>) {
    kernel((P)numbers[at]...);
}
template <class... P>
void call(void (*kernel)(P...), const void* numbers) {
    constexpr auto count = sizeof...(P);
    call(kernel, static_cast<const unsigned long long*>(numbers), std::make_integer_sequence<unsigned long, count>());
}
"""
# A's rows, written by a rank that is behind others.
_WRITE = """
void write_rows(uint4* to, const uint4* from, long long vectors, long long behind) {
    for (; behind > 0; --behind) emulator::emulator_yield();
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
}
"""


def unit(name: str) -> str:
    """A kernel whose parameters are 64-bit numbers in a row."""
    text = gather_kernels.SOURCE.read_text().replace("<moecomm/window.cuh>", '"include/moecomm/window.cuh"')
    casts = iter(("load", "round"))
    text, replaced = _CAST.subn(lambda _: f"result = moecomm::host::Fp16::{next(casts)}(value);", text)
    assert replaced == 2
    return (
        '#include "cuda.h"\n#include "host/casts.h"\n#include <utility>\n#define __global__\n'
        f"#define __launch_bounds__(...)\n{text}{_WRITE}{_CALL}"
        f'extern "C" void kernel(const void* numbers) {{ call({name}, numbers); }}\n'
    )


class Ranks:
    """GatherMatmul of all ranks.  run() runs all that they have launched since."""

    def __init__(self, machine: Machine, opened: Sequence[moecomm.Window], rows: int, columns: int, depth: int) -> None:
        self.windows, self._machine, self._seed = opened, machine, 0
        self.each = [GatherMatmul(window, rows, columns, depth) for window in opened]
        self._launched: list[tuple[int, str, int, tuple[int, ...]]] = []
        self._kept: list[torch.Tensor] = []
        for rank, one in enumerate(self.each):
            one._launch = partial(self._add, rank)  # type: ignore[method-assign]

    def _add(self, rank: int, name: str, blocks: int, *numbers: int) -> None:
        self._launched.append((rank, name, blocks, (self.windows[rank].handle_address, *numbers)))

    def fill(self, turn: int) -> torch.Tensor:
        """Whole numbers in A, by a launch, and in B, with places for results; returns their product."""
        g = torch.Generator().manual_seed(turn)
        rows, depth = self.each[0].a.shape
        a = torch.randint(-3, 4, (len(self.each) * rows, depth), generator=g).half()
        b = torch.randint(-2, 3, self.each[0].b.shape, generator=g).half()
        for rank, (one, mine) in enumerate(zip(self.each, a.split(rows), strict=True)):
            numbers = (one.a.data_ptr(), mine.data_ptr(), mine.nbytes // 16, 200 * (rank == turn % len(self.each)))
            self._launched.append((rank, "write_rows", 1, numbers))
            one.b = b
            one.out, one.gathered = (torch.full_like(of, torch.nan) for of in (one.out, one.gathered))
            self._kept += [mine, b, one.out, one.gathered]  # for launches: only addresses of them are there
        return (a.double() @ b.double()).half()

    def run(self) -> None:
        """Launches of a rank run one after the other, while other ranks are ahead or behind."""
        given, self._launched = self._launched, []
        self._seed += 1
        launches, last, kept = (Launch * len(given))(), {}, []
        for nth, (rank, name, blocks, numbers) in enumerate(given):
            entry = ctypes.cast(self._machine.library(unit(name)).kernel, ctypes.c_void_p).value
            kept.append((ctypes.c_uint64 * len(numbers))(*numbers))
            address, threads = ctypes.addressof(kept[-1]), gather_kernels.THREADS
            launches[nth] = Launch(entry, address, blocks, threads, 0, last.get(rank, -1))
            last[rank] = nth
        ended = self._machine.scheduler.emulator_run(ctypes.addressof(launches), len(given), LIMIT, self._seed)
        assert ended == 0, "a kernel does not end"


@contextmanager
def ranks_of(machine: Machine, ranks: int, rows: int, columns: int, depth: int) -> Iterator[Ranks]:
    with (
        windows(ranks, rows * depth * 2, signals=2 * ranks * rows) as opened,
        patch.object(moecomm.Window, "barrier", lambda _: None),  # run() is one
    ):
        yield Ranks(machine, opened, rows, columns, depth)


SIZES = [(1, 5, 20, 16), (2, 16, 300, 40), (4, 3, 17, 8)]  # ranks, rows of each, columns, depth


@pytest.mark.parametrize(("ranks", "rows", "columns", "depth"), SIZES)
def test_remote_reads(machine: Machine, ranks: int, rows: int, columns: int, depth: int) -> None:
    with ranks_of(machine, ranks, rows, columns, depth) as all_ranks:
        wanted = all_ranks.fill(0)
        all_ranks.run()
        for one in all_ranks.each:
            one.naive_remote_read()
        all_ranks.run()
        for one in all_ranks.each:
            assert torch.equal(one.out, wanted)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("ranks", "rows", "columns", "depth"), SIZES)
def test_gathers(machine: Machine, ranks: int, rows: int, columns: int, depth: int, blocks: int) -> None:
    """Rows are written and gathered several times without a stop: neither too early."""
    with ranks_of(machine, ranks, rows, columns, depth) as all_ranks:
        for one in all_ranks.each:
            one.blocks = blocks
        for turn in range(2):
            found = []
            for call in range(3):
                wanted = all_ranks.fill(10 * turn + call)
                for one in all_ranks.each:
                    found.append((one.gather_then_scalar(), wanted))
            all_ranks.run()
            assert all(torch.equal(out, wanted) for out, wanted in found)


def test_a_gather_alone_leaves_the_product_to_torch(machine: Machine) -> None:
    with ranks_of(machine, 2, 6, 24, 32) as all_ranks:
        wanted = all_ranks.fill(5)
        with patch.object(torch, "mm", lambda a, b, out: out):  # enqueued behind the kernel
            for one in all_ranks.each:
                one.gather_then_matmul()
        all_ranks.run()
        for one in all_ranks.each:
            assert torch.equal((one.gathered.double() @ one.b.double()).half(), wanted)
            assert one.out.isnan().all()


def test_an_owner_that_does_not_come_is_named(machine: Machine) -> None:
    with ranks_of(machine, 3, 2, 8, 8) as all_ranks:
        for window in all_ranks.windows:
            window._opened.handle.timeout_ns = 2_000_000  # 2000 passes of the machine
        all_ranks.fill(0)
        for one in all_ranks.each[:2]:
            one.blocks = 6  # a row each
            one.gather_then_scalar()
        all_ranks.run()
        errors: list[Any] = []
        for window in all_ranks.windows[:2]:
            record = _native.record(window._opened.peers.record)
            assert record is not None
            errors.append(error_of(record, {}))
        assert all(isinstance(error, moecomm.Timeout) for error in errors)
        assert 2 in {error.peer for error in errors}, errors
