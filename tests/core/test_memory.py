"""Window memory: blocks come back, and what a graph writes to is given to no eager round."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.rounds.memory import WindowMemory

from ..backends.conftest import run_ranks
from ..test_interrupts import interrupted


def ranges(blocks: Sequence[_native.Block]) -> set[range]:
    return {range(block.offset, block.offset + block.nbytes) for block in blocks}


def test_blocks_come_back() -> None:
    memory = WindowMemory(_native.Arena(512, 4096), lambda: False)
    blocks = [*memory.allocate(1000, 0), memory.rows(256)]
    assert [block.nbytes for block in blocks] == [1000, 0, 256]
    assert memory.used == 1024 + 256 + 256
    del blocks
    assert memory.used == 0


def test_no_room_is_told_and_takes_nothing() -> None:
    memory = WindowMemory(_native.Arena(0, 4096), lambda: False)
    with pytest.raises(moecomm.BadInput, match=r"window_bytes.*3072 bytes free.*4096 for this round"):
        memory.allocate(1024, 4096)
    assert memory.used == 0


def test_a_graph_keeps_its_memory_for_graphs() -> None:
    capturing = False
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: capturing)
    capturing = True
    captured = memory.allocate(1000, 2000)
    theirs = ranges(captured)
    del captured  # a replay writes there all the same
    capturing = False
    eager = [block for _ in range(8) for block in memory.allocate(1000, 2000)]
    assert not any(set(mine) & set(graph) for mine in ranges(eager) for graph in theirs)
    capturing = True
    assert ranges(memory.allocate(1000, 2000)) == theirs, "rounds of two graphs never run at the same time"


def test_graphs_with_larger_tables_have_the_same_rows() -> None:
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: True, tables=8192, reserve=1 << 14)
    places = set()
    for tables in (1000, 2000, 3000):
        kept, rows = memory.allocate(tables, 1 << 13)
        assert memory.stays(kept) and memory.stays(rows)
        places.add(rows.offset)
        del kept, rows
    assert len(places) == 1


def test_tables_and_rows_do_not_cut_each_other() -> None:
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: False, tables=8192 + 4096, reserve=1 << 14)
    handles = []
    for _ in range(8):  # rows are dropped, their handles are kept
        kept, rows = memory.allocate(1000, 1 << 13)
        assert rows.offset == 8192 and kept.end <= 8192
        handles.append(kept)
        del rows
    kept, rows = memory.allocate(1000, 1 << 13)
    assert memory.stays(kept) and memory.stays(rows), "further tables lie among rows, while there is room"


@pytest.mark.parametrize("seed", range(4))
def test_a_round_finds_room_whatever_stays(seed: int) -> None:
    """Blocks of graphs and of callers, of any sizes: only those that stay are kept, and no two of them meet."""
    rng, capturing = random.Random(seed), False
    end, reserve = 1 << 20, 1 << 18
    memory = WindowMemory(_native.Arena(256, end - 256), lambda: capturing, tables=1 << 15, reserve=reserve)
    kept: list[_native.Block] = []
    most = 0
    replayed: set[range] = set()  # what replays write to
    for _ in range(600):
        capturing = rng.random() < 0.2
        tables, rows = rng.randrange(1 << 12), rng.randrange(reserve - (1 << 12) - 512)
        blocks = list(memory.allocate(tables, rows))
        if rng.random() < 0.5:
            blocks[1].shrink(rng.randrange(blocks[1].nbytes + 1))
        stay = [block for block in blocks if memory.stays(block)]
        del blocks
        scratch = memory.scratch(rng.randrange(reserve)) if rng.random() < 0.3 else None
        if capturing:
            replayed |= ranges(stay) | ({range(scratch.offset, scratch.end)} if scratch is not None else set())
        else:
            kept += stay
        del scratch, stay
        rng.shuffle(kept)
        del kept[rng.randrange(12) :]
        most = max(most, len(kept))
        spans = sorted((block.offset, block.end) for block in kept)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert not any(start < graph.stop and graph.start < stop for start, stop in spans for graph in replayed)
        assert all(stop <= end - reserve for _, stop in spans)
    assert replayed and most > 4


def test_a_larger_round_enlarges_the_reserve() -> None:
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: False, tables=1024, reserve=1 << 12)
    large = memory.allocate(1000, 1 << 15)
    assert not memory.stays(large[1]), "another one would find no room"
    del large
    kept = []
    for _ in range(20):
        blocks = memory.allocate(1000, 1 << 13)
        kept += [block for block in blocks if memory.stays(block)]
        del blocks
        memory.allocate(1000, 1 << 15)
    assert kept


class Addresses:
    """Memory behind a heap; an extension is of use after some calls that ask for it."""

    def __init__(self, begin: int, calls: int) -> None:
        self._end, self._calls, self._asked = begin, calls, 0
        self._offered: tuple[int, int] | None = None

    def extend(self, nbytes: int, heap: object = None) -> tuple[int, int] | None:
        if self._offered is None:
            self._offered, self._asked = (self._end, -(-nbytes // 4096) * 4096), 0
            self._end += self._offered[1]
        self._asked += 1
        if self._asked <= self._calls:
            return None
        offered, self._offered = self._offered, None
        return offered


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_kept_finds_room_in_extensions(seed: int, calls: int) -> None:
    """Tables and rows of eager rounds and captures, and what they need meanwhile: no two of them meet."""
    rng, capturing = random.Random(seed), False
    end, reserve = 1 << 18, 1 << 16
    behind = Addresses(end, calls)
    arena = _native.Arena(256, end - 256)
    memory = WindowMemory(arena, lambda: capturing, tables=1 << 13, reserve=reserve, extend=behind.extend)
    kept: list[_native.Block] = []
    replayed: set[range] = set()
    outside, most = 0, 0
    for step in range(800):
        capturing = rng.random() < 0.2
        blocks = list(memory.allocate(rng.randrange(1 << 10), rng.randrange(reserve - (1 << 10) - 512)))
        stay = [block for block in blocks if memory.stays(block)]
        outside += step >= 600 and len(stay) < 2
        del blocks
        scratch = memory.scratch(rng.randrange(reserve)) if rng.random() < 0.3 else None
        if capturing:
            replayed |= ranges(stay) | ({range(scratch.offset, scratch.end)} if scratch is not None else set())
        else:
            kept += stay
        spans = sorted((block.offset, block.end) for block in kept)
        assert scratch is None or not any(scratch.offset < stop and start < scratch.end for start, stop in spans)
        del scratch, stay
        rng.shuffle(kept)
        del kept[rng.randrange(40) :]
        most = max(most, len(kept))
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert not any(start < graph.stop and graph.start < stop for start, stop in spans for graph in replayed)
        assert not any(start < end and stop > end - reserve for start, stop in spans), "the reserve is empty"
    assert outside == 0 and most > 20 and memory.nbytes > end
    kept.clear()
    assert memory.held == 0 and memory.used > 0, "graphs keep their pieces"


def test_a_capture_leaves_room_for_a_round_beside_it() -> None:
    capturing = True
    behind = Addresses(1 << 16, 0)
    arena = _native.Arena(0, 1 << 16)
    memory = WindowMemory(arena, lambda: capturing, tables=1024, reserve=1 << 15, extend=behind.extend)
    captured = memory.allocate(1000, 30_000)
    assert all(block.end <= (1 << 15) for block in captured) and memory.nbytes > 1 << 16
    size, capturing = memory.nbytes, False
    eager = memory.allocate(1000, 30_000)
    assert all(map(memory.stays, eager)) and memory.nbytes == size


def test_what_is_larger_than_the_reserve_finds_room_in_extensions() -> None:
    capturing = False
    behind = Addresses(1 << 16, 0)
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: capturing, reserve=1 << 14, extend=behind.extend)
    large = [*memory.allocate(1000, 1 << 18), memory.rows(1 << 17), memory.scratch(1 << 19)]
    assert all(map(memory.stays, large))
    capturing = True
    scratch = memory.scratch(1 << 20)
    place = ranges([scratch])
    del scratch
    capturing = False
    assert ranges([memory.scratch(1 << 20)]).isdisjoint(place), "a replay writes there"
    capturing = True
    assert ranges([memory.scratch(1 << 20)]) == place


@pytest.mark.parametrize("seed", range(4))
def test_a_reserve_that_moves_leaves_nobody_behind(seed: int) -> None:
    """Rounds larger than the reserve, graphs and kept blocks: no two meet, and no block stays where a replay writes."""
    rng, capturing = random.Random(seed), False
    behind = Addresses(1 << 20, 0)
    memory = WindowMemory(_native.Arena(256, (1 << 20) - 256), lambda: capturing, 1 << 14, 1 << 16, agrees=True)
    kept: list[_native.Block] = []
    replayed: list[range] = []
    for _ in range(400):
        capturing = rng.random() < 0.3
        size = rng.randrange(1 << rng.choice([12, 16, 17, 20]))
        if size > memory.parts.agreed and not capturing:
            lacks = memory.missing(size)
            memory.grown(size, behind.extend(lacks) if lacks else None)
            assert memory.parts.agreed == size <= memory.parts.reserve
        if size > memory.parts.agreed:
            continue
        blocks = list(memory.allocate(size // 8, size - size // 8))
        scratch = memory.scratch(rng.randrange(1 << 12))
        if capturing:
            replayed += [*ranges(blocks), *ranges([scratch])]
        else:
            kept += filter(memory.stays, blocks)
        del blocks, scratch
        rng.shuffle(kept)
        del kept[rng.randrange(8) :]
        spans = sorted((block.offset, block.end) for block in kept)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        for begin, end in spans:
            assert not any(begin < written.stop and written.start < end for written in replayed)
    assert memory.parts.extensions and memory.held == sum(-(-max(1, block.nbytes) // 256) * 256 for block in kept)


def test_an_interrupt_at_any_instruction_of_a_growth_loses_no_memory() -> None:
    """The reserve has moved with all that belongs to it, or is where it was."""
    number, was = 0, True
    while was:
        capturing = True
        memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: capturing, 1 << 12, 1 << 14, agrees=True)  # noqa: B023
        replayed = ranges([memory.scratch(1 << 10)])
        first, second = (1 << 16, 1 << 17), (1 << 20, 1 << 20)
        memory.grown(1 << 15, first)
        replayed |= ranges([memory.scratch(1 << 10)])
        capturing = False
        was = interrupted(partial(memory.grown, 1 << 17, second), number)
        if not memory.holds(second[0]):
            assert memory.nbytes == (1 << 16) + first[1] and memory.parts.reserve >= 1 << 15
            memory.grown(1 << 17, second)
        assert memory.nbytes == (1 << 16) + first[1] + second[1] and memory.parts.reserve >= 1 << 17
        assert memory.held == 0 and len(memory.parts.replayed) == 2, "of both reserves that graphs write to"
        blocks = [memory.scratch(1 << 17), *(memory.rows(1 << 12) for _ in range(200))]
        for graph in replayed:
            assert not any(block.offset < graph.stop and graph.start < block.end for block in blocks)
        number += 1
    assert number > 100


def test_an_interrupt_at_any_instruction_of_an_extension_loses_no_memory() -> None:
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 2, "backend": "host"}
    number, was = 0, True
    while was:
        with moecomm.Buffer("self", **sizes) as buffer:
            session, memory = buffer.rounds.session, buffer.rounds.memory
            heap, size = session.nbytes - memory.nbytes, 2 * memory.nbytes
            was = interrupted(partial(memory.rows, size), number)
            kept = [memory.rows(size), memory.rows(size)]
            assert session.nbytes - memory.nbytes == heap and len(kept) == 2, number
            number += 1
    assert number > 100


def test_a_reserve_that_has_moved_is_not_divided() -> None:
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: False, 1 << 12, 1 << 14, agrees=True)
    memory.divide(1 << 13, 1 << 15)
    assert (memory.parts.end, memory.parts.agreed) == (1 << 15, 1 << 15)
    memory.grown(1 << 17, (1 << 16, 1 << 18))
    before = memory.parts.end, memory.parts.reserve, memory.parts.first_row
    with pytest.raises(RuntimeError, match="the reserve has moved"):
        memory.divide(1 << 13, 1 << 15)
    assert (memory.parts.end, memory.parts.reserve, memory.parts.first_row) == before


def test_copies_are_told_once() -> None:
    memory = WindowMemory(_native.Arena(0, 1 << 16), lambda: False, reserve=1 << 14)
    with pytest.warns(UserWarning, match=f"window_bytes={(1 << 16) + (1 << 14)} "):
        memory.warn_of_copies()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.warn_of_copies()


def test_memory_that_is_out_on_one_rank_ends_the_round_on_all() -> None:
    def body(group: Any) -> str:
        x, ids = torch.ones(2, 64).bfloat16(), torch.tensor([[0], [1]])
        with moecomm.Buffer(group, hidden=64, num_experts=2, topk=1, max_tokens=2, backend="host") as buffer:
            memory = buffer.rounds.memory
            allocate = memory.allocate
            if group.rank == 1:
                memory.allocate = no_memory  # type: ignore[method-assign]
                with pytest.raises(torch.OutOfMemoryError):
                    buffer.dispatch(x, ids)
                memory.allocate = allocate  # type: ignore[method-assign]
            with pytest.raises(moecomm.OutOfStep) as caught:
                buffer.dispatch(x, ids)
            return str(caught.value)

    first, second = run_ranks(2, body)
    assert "0 failed on this rank" in first and "1 failed on this rank" in second


def no_memory(*_: int) -> list[_native.Block]:
    raise torch.OutOfMemoryError
