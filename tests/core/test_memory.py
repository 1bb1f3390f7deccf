"""Window memory: blocks come back, and what a graph writes to is given to no eager round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.core.memory import WindowMemory

from ..backends.conftest import run_ranks


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
