"""Windows over torch's symmetric memory, which files stand for on CPUs (tests/gpu/test_windows.py has the real one)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm

from ..backends.conftest import run_ranks
from ..conftest import Ranks
from .fake_symmetric_memory import FakeSymmetricMemory

sys.path.append(str(Path(__file__).parents[2] / "examples"))
HOST: dict[str, Any] = {"backend": "host", "timeout_s": 20.0}


def _adopted(rank: int, group: Any, folder: str) -> str:
    fake = FakeSymmetricMemory(folder, rank)
    memory = fake.empty(4, 32, dtype=torch.float32)
    memory.fill_(rank + 1)
    with moecomm.Window(group, memory=memory, **HOST) as window:
        assert (window.nbytes, window.backend, window.device) == (512, "host/torch", memory.device)
        mine, last, following = window.tensor((4, 32), torch.float32), (rank - 1) % 3, (rank + 1) % 3
        assert mine.data_ptr() == memory.data_ptr() and window.pointers[rank] == memory.data_ptr()
        assert (mine == rank + 1).all(), "the bytes stay as they are"
        window.barrier()
        assert (window.tensor((4, 32), torch.float32, rank=following) == following + 1).all()
        window.barrier()
        window.put(torch.full((32,), rank + 10.0), following, offset=128, signal=3)
        window.wait(3, 1, peer=last)
        assert (memory[1] == last + 10).all() and (memory[2] == rank + 1).all()
        assert window.signal_value(3) == 1
        kept = window.peer(following)
        assert fake.rendezvous(mine, group) is not None, "torch's operators take it"
        window.barrier()
    del window, mine
    assert (kept.view(torch.float32).view(4, 32)[2] == following + 1).all()
    return "done"


def test_a_tensor_of_torch_is_adopted(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, _adopted, str(tmp_path)) == ["done"] * 3


def _a_part(rank: int, group: Any, folder: str) -> list[int]:
    memory = FakeSymmetricMemory(folder, rank).empty(1024, dtype=torch.uint8)
    begin = 128 * (1 + rank)  # another on each rank
    with moecomm.Window(group, memory=memory[begin : begin + 256], **HOST) as window:
        window.put(torch.full((256,), 5 + rank, dtype=torch.uint8), 1 - rank)
        window.barrier()
        return [memory[begin - 1].item(), memory[begin].item(), memory[begin + 255].item(), memory[begin + 256].item()]


def test_a_part_of_a_tensor_is_adopted(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _a_part, str(tmp_path)) == [[1, 6, 6, 1], [1, 5, 5, 1]]


def _allocated(rank: int, group: Any, folder: str) -> str:
    fake = FakeSymmetricMemory(folder, rank)
    with moecomm.Window(group, 4096, memory="torch", **HOST) as window:
        assert window.backend == "host/torch" and not window.local.any() and window.nbytes == 4096
        assert not window.peer(1 - rank).any(), "zero before any rank goes on"
        assert fake.rendezvous(window.tensor((8,), torch.float32, offset=64), group) is not None
        window.barrier()
    return "done"


def test_a_window_allocates_through_torch(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _allocated, str(tmp_path)) == ["done"] * 2


def _ring(rank: int, group: Any, folder: str) -> list[float]:
    from window_ring import AllGather

    FakeSymmetricMemory(folder, rank)
    gather = AllGather(group, 100, memory="torch", **HOST)
    for call in range(3):
        rows = gather(torch.full((100,), rank + 10.0 * call))
    return rows[:, -1].tolist()


@pytest.mark.skipif(shutil.which("g++") is None, reason="wants g++")
def test_code_over_the_handle_finds_signals_and_memory(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, _ring, str(tmp_path)) == [[20.0, 21.0, 22.0]] * 3


def _left(rank: int, group: Any, folder: str) -> Any:
    FakeSymmetricMemory(folder, rank)
    window = moecomm.Window(group, 64, memory="torch", **HOST)
    if rank == 0:
        window.close()
        return 0
    with pytest.raises(moecomm.PeerLost) as caught:
        window.wait(0, 1, peer=0)
    window.close()
    return caught.value.peer


def test_a_rank_that_has_closed_is_named(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _left, str(tmp_path)) == [0, 0]


def _same_everywhere(fake: FakeSymmetricMemory) -> torch.Tensor:
    return fake.empty(16, 4, dtype=torch.float32)


BAD: dict[str, tuple[Callable[[FakeSymmetricMemory], dict[str, Any]], type[Exception], str]] = {
    "not symmetric": (lambda fake: {"memory": torch.zeros(16, 4)}, moecomm.BadInput, "memory"),
    "strides": (lambda fake: {"memory": _same_everywhere(fake).t()}, moecomm.BadInput, "memory"),
    "another word": (lambda fake: {"memory": "nccl"}, moecomm.BadInput, "memory"),
    "another type": (lambda fake: {"memory": 4096}, moecomm.BadInput, "memory"),
    "two sizes": (lambda fake: {"memory": _same_everywhere(fake), "nbytes": 256}, moecomm.BadInput, "nbytes"),
    "no size": (lambda fake: {"memory": "torch"}, moecomm.BadInput, "nbytes"),
    "device": (lambda fake: {"memory": _same_everywhere(fake), "device": "meta"}, moecomm.BadInput, "device"),
    "own memory": (lambda fake: {"nbytes": 256}, moecomm.Mismatch, "memory"),
    "size": (lambda fake: {"memory": fake.empty(16, dtype=torch.float32)}, moecomm.Mismatch, "nbytes"),
}


def _bad(rank: int, group: Any, folder: str) -> list[tuple[str, str, int]]:
    """One rank passes something else: the errors of this rank."""
    fake, found = FakeSymmetricMemory(folder, rank), []
    for name, (given, kind, text) in BAD.items():
        asked = given(fake) if rank == 1 else {"memory": _same_everywhere(fake)}
        with pytest.raises(kind) as caught:
            moecomm.Window(group, **{**HOST, **asked})
        assert text in str(caught.value), (name, caught.value)
        found.append((name, kind.__name__, fake.rendezvous_calls))
    moecomm.Window(group, memory=_same_everywhere(fake), **HOST).close()
    return found


def test_all_ranks_raise_the_error_of_one_before_torch_waits_for_it(ranks: Ranks, tmp_path: Path) -> None:
    wanted = [(name, kind.__name__, 0) for name, (_, kind, _) in BAD.items()]
    assert ranks.run(2, _bad, str(tmp_path)) == [wanted, wanted]


def _without_a_check(rank: int, group: Any, folder: str) -> str:
    """In torch 2.11 only the rendezvous knows."""
    FakeSymmetricMemory(folder, rank, says_what_is_symmetric=False)
    with pytest.raises(moecomm.Unsupported, match="memory") as caught:
        moecomm.Window(group, memory=torch.zeros(16), **HOST)
    return type(caught.value.__cause__).__name__


def test_torch_that_finds_out_late(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _without_a_check, str(tmp_path)) == ["BadInput"] * 2


def _of_another_group(rank: int, group: Any, folder: str) -> str:
    """The handle is that of the group, whatever torch gives."""
    fake = FakeSymmetricMemory(folder, rank)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    meet = fake.rendezvous
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous = lambda tensor, group: meet(tensor, alone)
    with pytest.raises(moecomm.Unsupported, match="a group of 1 ranks"):
        moecomm.Window(group, memory=_same_everywhere(fake), **HOST)
    return "done"


def test_memory_of_another_group_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _of_another_group, str(tmp_path)) == ["done"] * 2


def _on_cpus(rank: int, group: Any) -> str:
    with pytest.raises(moecomm.Unsupported, match="device type cpu") as caught:
        moecomm.Window(group, 64, memory="torch", **HOST)
    return type(caught.value).__name__


def test_torch_itself_has_none_on_cpus(ranks: Ranks) -> None:
    assert ranks.run(2, _on_cpus) == ["Unsupported"] * 2


def test_groups_that_torch_does_not_know() -> None:
    with pytest.raises(moecomm.BadInput, match="process group") as caught:
        moecomm.Window("self", 64, memory="torch", **HOST)
    assert caught.value.argument == "group"
    found = run_ranks(2, lambda group: moecomm.Window(group, 64, memory="torch", **HOST))
    assert [type(error) for error in found] == [moecomm.BadInput] * 2
