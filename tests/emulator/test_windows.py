"""Kernels over Windows, compiled by g++: the examples', and one for each function of the device interface."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.window.failures import error_of
from tests.backends.conftest import run_ranks
from tests.window.test_examples import heated, reference

from .machine import LIMIT, Launch, Machine

sys.path.append(str(Path(__file__).parents[2] / "examples"))
# A put of every alignment by warps and blocks, by TMA, and every function that signals; each rank serves the next one.
EVERYTHING = r"""
#include <moecomm/window.cuh>
using namespace moecomm;
extern "C" __global__ void everything(const Window* handle, u64 bytes, u64 turn) {
    extern __shared__ __align__(128) u8 memory[];
    const Window window = *handle;
    const CoopBlock block;
    const CoopWarp warp;
    const i32 next = (window.rank + 1) % window.ranks, last = (window.rank + window.ranks - 1) % window.ranks;
    const u64 in = bytes, odd = 2 * bytes, bulk = 3 * bytes, raw = 4 * bytes;  // places in the memory of the next rank
    if (!window.barrier(block, blockIdx.x)) return;
    if (blockIdx.x == 0) {
        window.put_signal(block, next, in, window.local<>(), bytes, 0, 1);
        if (threadIdx.x / 32 == 0) window.put_signal(warp, next, odd + 1, window.local<u8>(1), bytes - 3, 1, 1);
        if (threadIdx.x / 32 == 1) window.put_signal(warp, next, raw + 4, window.local<u8>(4), bytes - 8, 2, 5);
    } else {
        for (u64 i = threadIdx.x; i < bytes; i += blockDim.x) memory[i] = window.local<u8>()[i];
        put_bulk(block, window, next, bulk, memory, static_cast<i32>(bytes));
        put_bulk_wait(block);
        if (threadIdx.x == 0) window.set_signal(next, 3, turn);
    }
    const bool here = window.wait(block, 0, turn, last) && window.wait(block, 1, turn, last) &&
                      window.wait(block, 2, 5 * turn) && window.wait(block, 3, turn, last);
    if (here && threadIdx.x == 0) window.signal(next, 4, window.signal_value(3));
    if (here) window.barrier(warp, 2 + blockIdx.x * 8 + threadIdx.x / 32);
}
"""


# All threads of all ranks write, meet, and look: word `count` of each rank counts what was not there.
MEET = r"""
#include <moecomm/window.cuh>
using namespace moecomm;
extern "C" __global__ void meet(const Window* handle, u64 count, u64 turns) {
    const Window window = *handle;
    const CoopBlock block;
    for (u64 turn = 1; turn <= turns; ++turn) {
        for (i32 peer = 0; peer < window.ranks; ++peer)
            for (u64 i = threadIdx.x; i < count; i += blockDim.x)
                *window.peer<volatile u64>(peer, (window.rank * count + i) * 8) = turn * 1000 + i;
        if (!window.barrier(block, 7)) return;
        for (u64 i = threadIdx.x; i < window.ranks * count; i += blockDim.x)
            if (*window.local<volatile u64>(i * 8) != turn * 1000 + i % count)
                atomicAdd(window.local<u64>(window.ranks * count * 8), 1);
        if (!window.barrier(block, 7)) return;
    }
}
"""


# A put whose second warp is late: word `count` of each rank counts what had not come with the signal.
LATE = r"""
#include <moecomm/window.cuh>
using namespace moecomm;
extern "C" __global__ void late(const Window* handle, u64 count, u64 turns) {
    const Window window = *handle;
    const CoopBlock block;
    const i32 next = (window.rank + 1) % window.ranks, last = (window.rank + window.ranks - 1) % window.ranks;
    u64* const source = window.local<u64>(8 * (count + 1));
    for (u64 turn = 1; turn <= turns; ++turn) {
        for (u64 i = threadIdx.x; i < count; i += blockDim.x) source[i] = turn * 1000 + i;
        __syncthreads();
        for (i32 passes = threadIdx.x / 32 * 20; passes > 0; --passes) emulator::emulator_yield();
        window.put_signal(block, next, 0, source, 8 * count, 0, 1);
        if (!window.wait(block, 0, turn, last)) return;
        for (u64 i = threadIdx.x; i < count; i += blockDim.x)
            if (window.local<u64>()[i] != turn * 1000 + i) atomicAdd(window.local<u64>(8 * count), 1);
        if (!window.barrier(block)) return;
    }
}
"""


class KernelArgs(ctypes.Structure):
    _fields_ = (("handle", ctypes.c_uint64), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


def unit(source: str, entry: str, second: str) -> str:
    """Arguments of a kernel with a handle and two more parameters."""
    text = source.replace("<moecomm/window.cuh>", '"include/moecomm/window.cuh"').replace("defined(__CUDACC__)", "1")
    text = text.replace(
        "extern __shared__ __align__(128) u8 memory[]", "u8* memory = emulator::emulator_thread->of_block->shared"
    )
    return (
        f'#include "cuda.h"\n#define __global__\n{text}\n'
        f"struct KernelArgs {{ const moecomm::Window* handle; unsigned long long first, second; }};\n"
        f'extern "C" void kernel(const void* of) {{ const auto& a = *static_cast<const KernelArgs*>(of); '
        f"{entry}(a.handle, a.first, static_cast<{second}>(a.second)); }}\n"
    )


@contextmanager
def windows(ranks: int, nbytes: int, **options: Any) -> Iterator[list[moecomm.Window]]:
    opened = run_ranks(ranks, lambda group: moecomm.Window(group, nbytes, backend="host", **options))
    yield opened
    for window in opened:
        window.close()


def run(
    machine: Machine,
    text: str,
    opened: Sequence[moecomm.Window],
    first: int,
    second: int,
    blocks: int = 1,
    seed: int = 0,
) -> None:
    """Launch the kernel on all ranks at once."""
    library = machine.library(text)
    address = ctypes.cast(library.kernel, ctypes.c_void_p).value
    args = [KernelArgs(window.handle_address, first, second) for window in opened]
    launches = (Launch * len(args))(*(Launch(address, ctypes.addressof(a), blocks, 64, 8192, -1) for a in args))
    assert machine.scheduler.emulator_run(ctypes.addressof(launches), len(args), LIMIT, seed) == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ring_of_the_example(machine: Machine, ranks: int) -> None:
    import window_ring as example

    text, columns = unit(example.SOURCE, "ring", "unsigned long long"), 1000
    rows = torch.rand(5, ranks, columns, generator=torch.Generator().manual_seed(ranks))
    with windows(ranks, 1 << 16) as opened:
        for call, wanted in enumerate(rows):
            for window in opened:
                window.tensor((ranks, columns), torch.float32)[window.rank] = wanted[window.rank]
            run(machine, text, opened, columns * 4, call * (ranks - 1), seed=call)
            for window in opened:
                assert torch.equal(window.tensor((ranks, columns), torch.float32), wanted)


@pytest.mark.parametrize(("ranks", "cells", "steps"), [(2, 64, 10), (3, 33, 21)])
def test_the_halo_exchange_of_the_example(machine: Machine, ranks: int, cells: int, steps: int) -> None:
    import window_halo as example

    with windows(ranks, 1 << 16) as opened:
        shape = (2, cells + 2 * example.HALO)
        for window in opened:
            window.tensor(shape, torch.float32)[0, 32:-32] = heated(window.rank, cells)
        run(machine, unit(example.SOURCE, "heat", "int"), opened, cells, steps)
        found = [window.tensor(shape, torch.float32)[steps % 2, 32:-32] for window in opened]
        torch.testing.assert_close(torch.stack(found), reference(ranks, cells, steps))


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_function(machine: Machine, ranks: int) -> None:
    text, nbytes, turns = unit(EVERYTHING, "everything", "unsigned long long"), 1040, 4
    with windows(ranks, 5 * nbytes) as opened:
        for turn in range(1, turns + 1):
            mine = torch.randint(0, 256, (ranks, nbytes), dtype=torch.uint8)
            for window, bytes_of_rank in zip(opened, mine, strict=True):
                window.local[:nbytes] = bytes_of_rank
                window.local[nbytes:] = 7
            run(machine, text, opened, nbytes, turn, blocks=2, seed=turn)
            for window in opened:
                theirs = mine[window.rank - 1]
                arrived, odd, bulk, raw = window.local[nbytes:].view(4, nbytes)
                assert torch.equal(arrived, theirs) and torch.equal(bulk, theirs)
                for place, begin, end in ((odd, 1, nbytes - 2), (raw, 4, nbytes - 4)):
                    assert torch.equal(place[begin:end], theirs[begin:end])
                    assert (place[:begin] == 7).all() and (place[end:] == 7).all()
                assert [window.signal_value(i) for i in range(4)] == [turn, turn, 5 * turn, turn]
                assert window.signal_value(4) == 2 * turn * (turn + 1) // 2


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_that_was_written_before_a_barrier_is_there_after_it(machine: Machine, ranks: int) -> None:
    count, turns = 150, 12
    with windows(ranks, 8 * (ranks * count + 1)) as opened:
        for seed in range(3):
            run(machine, unit(MEET, "meet", "unsigned long long"), opened, count, turns, seed=seed)
        for window in opened:
            assert window.tensor((1,), torch.int64, offset=8 * ranks * count).item() == 0


def test_a_signal_covers_the_stores_of_all_threads(machine: Machine) -> None:
    count = 301
    with windows(2, 8 * (2 * count + 1)) as opened:
        run(machine, unit(LATE, "late", "unsigned long long"), opened, count, 5)
        for window in opened:
            assert window.tensor((1,), torch.int64, offset=8 * count).item() == 0


def test_a_rank_that_does_not_come_is_named_by_all(machine: Machine) -> None:
    """The kernels end, and every record says who was missing."""
    with windows(3, 4096) as opened:
        for window in opened:
            window._opened.handle.timeout_ns = 2_000_000  # 2000 passes of the machine
        run(machine, unit(EVERYTHING, "everything", "unsigned long long"), opened[:2], 512, 1, blocks=2)
        for window in opened[:2]:
            record = _native.record(window._opened.peers.record)
            assert record is not None
            error = error_of(record, {})
            assert isinstance(error, moecomm.Timeout) and (error.peer, error.op) == (2, "barrier"), error


def test_a_rank_that_has_closed_is_named(machine: Machine) -> None:
    with windows(2, 4096) as opened:
        opened[1].close()
        run(machine, unit(EVERYTHING, "everything", "unsigned long long"), opened[:1], 512, 1)
        with pytest.raises(moecomm.PeerLost, match="rank 1 is gone"):
            opened[0].check()
