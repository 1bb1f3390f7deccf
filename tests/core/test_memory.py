"""Window memory: blocks come back, and what a graph writes to is given to no eager round."""

from __future__ import annotations

import pytest

import moecomm
from moecomm import _native
from moecomm.core.memory import WindowMemory


def ranges(blocks: list[_native.Block]) -> set[range]:
    return {range(block.offset, block.offset + block.nbytes) for block in blocks}


def test_blocks_come_back() -> None:
    memory = WindowMemory(_native.Arena(512, 4096), lambda: False)
    blocks = memory.allocate(1000, 0, 256)
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
