"""Placements that change between rounds of a stream, whose dispatches begin while the kernels before them end."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from moecomm import dispatch
from moecomm.backends import between_rounds, host
from moecomm.errors import Mismatch, MoecommError
from moecomm.gpu import jit
from moecomm.gpu.structs import struct
from moecomm.testing import LocalBuffers, random_case
from moecomm.testing.cases import random_placement
from moecomm.testing.check import Wanted, dispatch_call
from moecomm.testing.prepare import prepare_dispatch

from ..few import few
from ..native.mutants import Mutant
from . import plain
from .machine import LIMIT, Call, Launch, Machine, units
from .test_kernels import UNEVEN
from .test_mutants import PLAIN
from .units import Units, edited

RANKS, SLOTS, ROUNDS = 3, 6, 5
_UNIT = """#include "cuda.h"
#include "device/between_rounds.cuh"
using namespace moecomm;
extern "C" void kernel(const void* args) { set_placement(*static_cast<const SetPlacementArgs*>(args)); }
"""


def drawn(seed: int) -> Any:
    return random_placement(seed, ranks=RANKS, num_experts=UNEVEN["num_experts"], slots=SLOTS)


class Streams:
    """Launches of each rank in its order, which are run together.

    Args:
        machine: compiles dispatches, and runs.
        library: of the kernel that writes tables.
    """

    def __init__(self, machine: Machine, library: ctypes.CDLL) -> None:
        self._machine, self._kernel = machine, library
        self._of_rank: list[list[tuple[Any, bytes, int, int, int, int]]] = [[] for _ in range(RANKS)]
        self._tables: list[array[int]] = []

    def place(self, session: host.HostSession, words: Sequence[int]) -> None:
        """In place of HostSession.place(): in the stream, as on GPUs."""
        self._tables.append(table := array("I", words))
        args = struct("SetPlacementArgs")(table.buffer_info()[0], session._placement, len(table))
        threads = between_rounds.SET_PLACEMENT.threads
        self._of_rank[session.context.rank].append((self._kernel, bytes(args), 1, threads, 0, 0))

    def dispatch(self, routed: Sequence[Any], rng: random.Random) -> None:
        for rank, one in enumerate(routed):
            call = Call(one.args, self._machine.sizes)
            fields = jit.block_fields(call.spec)
            sizes = rng.choice([1, 2, 3]), jit.block_threads(fields), fields["shared_bytes"]
            self._of_rank[rank].append((self._machine._kernel(call.spec), call.content, *sizes, 1))

    def run(self, seed: int) -> None:
        launches, kept = list[Launch](), list[Any]()
        for mine in self._of_rank:
            for nth, (library, content, *sizes, early) in enumerate(mine):
                kept.append(buffer := ctypes.create_string_buffer(content, len(content)))
                entry = ctypes.cast(library.kernel, ctypes.c_void_p).value
                after, early = (len(launches) - 1, early) if nth else (-1, 0)
                launches.append(Launch(entry, ctypes.addressof(buffer), *sizes, after, early))
        all_of_them = (Launch * len(launches))(*launches)
        ended = self._machine.scheduler.emulator_run(ctypes.addressof(all_of_them), len(launches), 3 * LIMIT, seed)
        assert ended == 0, "it does not end"


def rounds(seed: int, machine: Machine, kernel: ctypes.CDLL, late: bool = False) -> None:
    """Compare rounds with the reference by the placement of each.  `late`: one rank leaves out one of the changes."""
    rng, made = random.Random(seed), list[tuple[Wanted, list[Any]]]()
    streams = Streams(machine, kernel)
    with LocalBuffers(ranks=RANKS, **UNEVEN, backend="host", placement=drawn(10 * seed)) as ranks:
        with mock.patch.object(host.HostSession, "place", lambda session, words: streams.place(session, words)):
            for nth in range(ROUNDS):
                for _ in range(rng.choice([1, 1, 2]) if nth % 3 else 0):
                    placement = drawn(10 * seed + rng.randint(1, 9))
                    for buffer in ranks.buffers:
                        if not (late and (nth, buffer.rank) == (2, 1)):
                            buffer.set_placement(placement)
                case = random_case(rng.randrange(1000), ranks=RANKS, **UNEVEN, few_kernels=True, payloads=False)
                case = replace(case, **PLAIN | {"x": [rows.to(UNEVEN["dtype"]) for rows in case.x]})
                calls = [dispatch_call(case, rank, ranks.device) for rank in range(RANKS)]
                routed = [prepare_dispatch(buffer, **call) for buffer, call in zip(ranks.buffers, calls, strict=True)]
                streams.dispatch(routed, rng)
                made.append((Wanted(case, ranks.buffers[0]), routed))
        try:
            streams.run(seed)
            if late:
                for buffer in ranks.buffers:
                    with pytest.raises(Mismatch, match="placement"):
                        buffer.check()
                return
            for wanted, routed in made:
                for buffer, here in zip(ranks.buffers, routed, strict=True):
                    wanted.check_routed(buffer.rank, dispatch.finish(buffer.rounds, here))
        finally:
            machine.forget()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("seed", few(range(8), 0))
def test_rounds_follow_the_placement_of_their_place(
    seed: int, packs: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are up to a round apart, and tables change beside their rounds: none, one or two between two of them."""
    if not packs:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    rounds(seed, machine, units().library(_UNIT))


@pytest.mark.parametrize("packs", [True, False])
def test_a_rank_that_leaves_out_a_change(packs: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packs:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    rounds(0, machine, units().library(_UNIT), late=True)


MUTANTS = [  # of the kernel that writes tables
    Mutant(name, "device/between_rounds.cuh", old, new, caught_by="rounds")
    for name, old, new in (
        (
            "the next dispatch may begin while the table is written",
            "    for (i32 i = threadIdx.x; i < a.count;",
            "    emulator::let_next_launch();\n    for (i32 i = threadIdx.x; i < a.count;",
        ),
        ("half of the table is written", "i < a.count;", "i < a.count / 2;"),
        ("words of the table are those before", "a.words)[i]", "a.words)[i > 4 ? i - 1 : i]"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, machine: Machine) -> None:
    kernel = Units(edited(plain.write, mutant.file, mutant.old, mutant.new), "cuda.h").library(_UNIT)

    def some_rounds() -> None:
        for seed in range(4):
            rounds(seed, machine, kernel)

    with pytest.raises((AssertionError, MoecommError)):
        some_rounds()
