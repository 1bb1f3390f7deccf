"""Quiesce between rounds: earlier puts have arrived, and signals are reset."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.backends import between_rounds, emulated_nic
from moecomm.testing import LocalBuffers

from .machine import LIMIT, Launch, Machine, offsets

RANKS, SIZE, PUTS, BYTES = 6, 2, 24, 256
TIMEOUT_NS = 20_000_000  # of the machine's clock; ranks open by the clock of the host, which may be busy
# A round that is abandoned: rows and signals to each rank of another domain, by both channels.  Nobody waits for them.
ABANDONED = (
    f"""
#include "cuda.h"
#include "device/between_rounds.cuh"
#include "transport/puts.cuh"
using namespace moecomm;
constexpr i32 kPuts = {PUTS}, kBytes = {BYTES};
"""
    """
extern "C" void abandoned(const void* args) {
    const Context& ctx = static_cast<const QuiesceArgs*>(args)->ctx;
    for (i32 peer = 0; peer < ctx.shape.ranks; ++peer) {
        if (!puts_to(ctx, ~0ull, peer)) continue;
        for (i32 n = 0; n < kPuts; ++n) {
            const u64 from = ctx.window.heap + n * kBytes, to = from + (1 + ctx.rank) * kPuts * kBytes;
            Puts(ctx, n % 2).put_add(peer, to, from, kBytes, n * 5 % signals(ctx.shape), 12345 + n);
        }
    }
}
extern "C" void quiet(const void* args) { quiesce<Puts>(*static_cast<const QuiesceArgs*>(args)); }
"""
)


class Job:
    """Ranks in windows of CPU ranks, and the kernels that they run together."""

    def __init__(self, machine: Machine, ranks: LocalBuffers) -> None:
        self.machine = machine
        self.kernels = machine.library(ABANDONED)
        self.contexts = [buffer.rounds.session.context for buffer in ranks.buffers]
        for context in self.contexts:
            context.timeout_ns = TIMEOUT_NS
        self.windows = [context.peers[rank] for rank, context in enumerate(self.contexts)]
        self.links = emulated_nic.link(None, self.windows, torch.device("cpu"))
        self.reports = [
            ctypes.create_string_buffer(b"?" * between_rounds.REPORT_BYTES, between_rounds.REPORT_BYTES)
            for _ in self.contexts
        ]
        self.agreement = self.seed = 0
        for rank in range(RANKS):
            self.rows(rank, rank, -1).fill_(rank + 1)

    def rows(self, at: int, rank: int, nth: int | None = None) -> torch.Tensor:
        """Return what `rank` has put to a window; `nth` -1: the rows that it puts, in its own."""
        place = self.windows[at] + self.contexts[at].window.heap + (0 if nth == -1 else (1 + rank) * PUTS * BYTES)
        return torch.frombuffer((ctypes.c_uint8 * (PUTS * BYTES)).from_address(place), dtype=torch.uint8)

    def words(self, rank: int) -> tuple[Any, Any]:
        """Return the signals of a rank, and the last values of its signals at others."""
        layout, shape = self.contexts[rank].window, self.contexts[rank].shape
        half = (layout.counters - layout.signals) // 2
        count = 3 * shape.ranks + 4 * (RANKS // SIZE) * shape.ring_tokens
        parts = (self.windows[rank] + layout.signals + offset for offset in (0, half))
        signals, values = ((ctypes.c_uint64 * count).from_address(part) for part in parts)
        return signals, values

    def run(self, kernel: Any, ranks: Collection[int], masked: Collection[int] = (), last_round: int = 0) -> None:
        launches, kept = (Launch * len(ranks))(), []
        for nth, rank in enumerate(ranks):
            context, report = self.contexts[rank], ctypes.addressof(self.reports[rank])
            args = between_rounds.quiesce_arguments(context, masked, self.agreement, last_round, report)
            link = ctypes.c_uint64.from_buffer(args, offsets()[2])  # that of kernels is another than that of CPU ranks
            assert link.value == context.link
            link.value = self.links.data_ptr()
            kept.append(args)
            threads = 64 if kernel is self.kernels.quiet else 32
            address = ctypes.cast(kernel, ctypes.c_void_p).value
            launches[nth] = Launch(address, ctypes.addressof(args), 1, threads, 0, -1)
        self.seed += 1
        assert self.machine.scheduler.emulator_run(ctypes.addressof(launches), len(launches), LIMIT, self.seed) == 0

    def agree(self, masked: Collection[int], last_round: int, absent: Collection[int] = ()) -> dict[int, set[int]]:
        """Return the ranks that those which take part miss."""
        self.agreement += 2
        here = [rank for rank in range(RANKS) if rank not in {*masked, *absent}]
        self.run(self.kernels.quiet, here, masked, last_round)
        return {rank: between_rounds.reported(self.reports[rank].raw) for rank in here}


@pytest.fixture
def job(machine: Machine) -> Iterator[Job]:
    sizes = {"hidden": 64, "num_experts": 12, "topk": 2, "max_tokens": 200, "dtype": torch.bfloat16}
    with LocalBuffers(RANKS, domain_ranks=SIZE, **sizes, backend="host") as ranks:
        try:
            yield Job(machine, ranks)
        finally:
            machine.forget()


def other_domains(rank: int) -> list[int]:
    return [other for other in range(RANKS) if other // SIZE != rank // SIZE]


def test_what_was_put_before_has_arrived_and_signals_begin_anew(job: Job) -> None:
    unfinished = 0
    for last_round in range(5, 11):
        job.run(job.kernels.abandoned, range(RANKS))
        for at in range(RANKS):
            job.words(at)[1][:] = range(len(job.words(at)[1]))
        unfinished += any(
            len(set(job.rows(at, rank).tolist())) > 1 for at in range(RANKS) for rank in other_domains(at)
        )
        assert job.agree([], last_round) == {rank: set() for rank in range(RANKS)}
        for at in range(RANKS):
            for rank in other_domains(at):
                assert bool((job.rows(at, rank) == rank + 1).all())
                job.rows(at, rank).zero_()
            signals, values = map(list, job.words(at))
            resumed = int.from_bytes(_native.resumed_signals(job.contexts[0].shape, last_round)[:8], "little")
            assert signals == [resumed] * RANKS + [0] * (len(signals) - RANKS) and not any(values)
    assert unfinished, "no put was ever late"


def test_ranks_go_and_come_and_one_that_is_absent_is_named(job: Job) -> None:
    everybody = set(range(RANKS))
    for masked, absent in (([], []), ([4], []), ([4, 1], []), ([4], [2]), ([4, 2], []), ([4], []), ([], [0]), ([], [])):
        job.run(job.kernels.abandoned, sorted(everybody - set(masked)))
        found = job.agree(masked, 20, absent)
        assert found == {rank: set(absent) - {rank ^ 1} for rank in found}
        if not absent:
            for at in found:
                for rank in set(other_domains(at)) - set(masked):
                    assert bool((job.rows(at, rank) == rank + 1).all())
                    job.rows(at, rank).zero_()
