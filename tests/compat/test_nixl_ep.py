"""nixl_ep's interface: ranks connect, disconnect, are masked and killed, and every round between is exact."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.compat import nixl_ep
from moecomm.compat.nixl_ep import meet

from ..conftest import Ranks

HIDDEN, TOKENS, TOPK, EXPERTS, MOST = 128, 6, 3, 2, 4  # experts of a rank, and the most ranks


def open_buffer(store: Any, rank: int, timeout_ms: int = 20_000) -> nixl_ep.Buffer:
    buffer = nixl_ep.Buffer(rank=rank, explicitly_destroy=True, tcp_store_group=store, timeout_ms=timeout_ms)
    buffer.update_memory_buffers(MOST, EXPERTS, 0)
    return buffer


def exact_round(buffer: nixl_ep.Buffer, zero_copy: bool = False, device: str = "cpu") -> None:
    """Experts give their rows back: a token's sum is itself by the weights of the experts that are there."""
    g = torch.Generator().manual_seed(buffer.rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=g).bfloat16().to(device)
    ids = torch.rand(TOKENS, MOST * EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous().to(device)
    ids[0, 0] = -1
    stats = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    recv_x, count, handle, event, _ = buffer.dispatch(
        x, ids, TOKENS, cumulative_local_expert_recv_stats=stats, use_fp8=False, async_finish=True
    )
    event.current_stream_wait()
    weights = torch.randint(1, 4, (TOKENS, TOPK), generator=g).float().to(device)
    if zero_copy:
        buffer.get_next_combine_buffer(handle).copy_(recv_x)
    out, *_ = buffer.combine(recv_x, ids, weights, handle, zero_copy=zero_copy)
    for one in buffer._met.buffers():
        one.check()  # of GPU ranks: the round may have failed
    assert torch.equal(stats, count)
    status = torch.full((MOST,), 7, dtype=torch.int32, device=device)
    buffer.query_mask_buffer(status)  # behind the round, which may have masked a rank
    there = (ids >= 0) & (status[ids.clamp(min=0) // EXPERTS] == 0)
    assert torch.equal(out, (x.float() * (weights * there).sum(dim=1, keepdim=True)).bfloat16())


class Phases:
    """Ranks as threads, which go through the phases of a plan together."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.buffers = [open_buffer(self.store, rank) for rank in range(MOST)]

    def run(self, ranks: list[int], step: Callable[[nixl_ep.Buffer], Any] = lambda _: None) -> None:
        """By these ranks: `step`, a round, and its mask."""

        def body(rank: int) -> list[int]:
            step(self.buffers[rank])
            exact_round(self.buffers[rank], zero_copy=rank % 2 == 1)
            status = torch.zeros(MOST, dtype=torch.int32)
            self.buffers[rank].query_mask_buffer(status)
            return [other for other in range(MOST) if status[other] == 0]

        with ThreadPoolExecutor(MOST) as pool:
            assert list(pool.map(body, ranks)) == [ranks] * len(ranks)


@pytest.fixture
def phases() -> Iterator[Phases]:
    found = Phases()
    yield found
    for buffer in found.buffers:
        buffer.destroy()
        buffer.destroy()


def test_ranks_connect_and_disconnect(phases: Phases) -> None:
    phases.run([0, 1], lambda buffer: buffer.connect_ranks([0, 1]))
    phases.run([0, 1])
    phases.run([0, 1, 2, 3], lambda buffer: buffer.connect_ranks([0, 1, 2, 3] if buffer.rank > 1 else [2, 3]))
    phases.run([0, 1, 2], lambda buffer: buffer.disconnect_ranks([3]))
    phases.buffers[3].destroy()
    phases.buffers[3] = open_buffer(phases.store, 3)
    phases.run([0, 1, 2, 3], lambda buffer: buffer.connect_ranks(range(MOST)))
    phases.run([0, 1, 2, 3], lambda buffer: buffer.barrier())


def test_ranks_that_are_left_have_gaps(phases: Phases) -> None:
    phases.run([0, 1, 2, 3], lambda buffer: buffer.connect_ranks(range(MOST)))
    phases.run([0, 3], lambda buffer: buffer.disconnect_ranks([1, 2]))
    before = [buffer._met for buffer in phases.buffers]
    phases.run([0, 3], lambda buffer: buffer.connect_ranks([]))  # in windows without the others
    assert phases.buffers[0]._met is not before[0]
    before = [buffer._met for buffer in phases.buffers]
    phases.run([0, 3], lambda buffer: buffer.connect_ranks([0, 3]))  # nothing new
    assert phases.buffers[0]._met is before[0]
    for rank in (1, 2):
        phases.buffers[rank].destroy()
    phases.buffers[1] = open_buffer(phases.store, 1)
    phases.run([0, 1, 3], lambda buffer: buffer.connect_ranks([0, 1, 3]))


def test_a_disconnect_before_the_first_round(phases: Phases) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda buffer: buffer.connect_ranks(range(3)), phases.buffers[:3]))
    phases.run([0, 2], lambda buffer: buffer.disconnect_ranks([1]))


@pytest.mark.parametrize("how", ["one by one", "all"])
def test_ranks_stand_by_until_they_are_taken_in(phases: Phases, how: str) -> None:
    """As vLLM grows: the others connect ranks that are starting, make rounds, and then take them in."""

    def stand_by(buffer: nixl_ep.Buffer) -> None:
        buffer.connect_ranks([2, 3], activate=False)
        exact_round(buffer)

    def take_in(buffer: nixl_ep.Buffer) -> None:
        if buffer.rank > 1:
            buffer.connect_ranks(range(MOST))
        elif how == "all":
            buffer.clean_mask_buffer()
        else:
            for rank in (2, 3):
                buffer.update_mask_buffer(rank, mask=False)

    phases.run([0, 1], lambda buffer: buffer.connect_ranks([0, 1]))
    phases.run([0, 1], stand_by)
    phases.run([0, 1, 2, 3], take_in)
    phases.run([0, 1], lambda buffer: buffer.disconnect_ranks([2, 3]))


def test_masks(phases: Phases) -> None:
    def mask(buffer: nixl_ep.Buffer) -> None:
        buffer.update_mask_buffer(1, True)
        buffer.update_mask_buffer(1, True)  # changes nothing
        with pytest.raises(moecomm.Unsupported, match=r"connect_ranks\(\[\]\)"):
            buffer.dispatch(torch.zeros(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), 1, use_fp8=False)

    phases.run([0, 1, 2], lambda buffer: buffer.connect_ranks([0, 1, 2]))
    phases.run([0, 2], mask)
    phases.run([0, 1, 2], lambda buffer: buffer.update_mask_buffer(1))
    phases.run([0, 1, 2], lambda buffer: buffer.clean_mask_buffer())
    phases.run([0, 2], lambda buffer: buffer.update_mask_buffer(1, True))
    phases.run([0, 1, 2], lambda buffer: buffer.clean_mask_buffer())


LOST = MOST - 1


def lose_a_rank(rank: int, _: Any, directory: Path, when: str, how: str) -> list[float]:
    """The last rank ends before or after its second dispatch.  The calls of the others go on without its tokens and its
    experts, and their handles keep the order of rows that they have had.
    """
    buffer = open_buffer(dist.FileStore(str(directory / "elastic"), -1), rank)
    buffer.connect_ranks(range(MOST))
    for _ in range(2):
        exact_round(buffer)
    (directory / f"made{rank}").touch()
    until_there(*(directory / f"made{other}" for other in range(MOST)))

    def end() -> None:
        if how == "leaves":
            buffer.destroy()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == LOST and when == "dispatch":
        end()
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(1, 9, (TOKENS, HIDDEN), generator=g).bfloat16()
    ids = torch.stack([torch.randperm(MOST * EXPERTS, generator=g)[:TOPK] for _ in range(TOKENS)])
    weights = torch.randint(1, 4, (TOKENS, TOPK), generator=g).float()
    there = (ids // EXPERTS < LOST).float()
    with_hook = rank % 2 == 1
    rows, counts, handle, _, hook = buffer.dispatch(x, ids, TOKENS, use_fp8=False, return_recv_hook=with_hook)
    if hook is not None:
        hook()
    if rank == LOST:
        end()
    if when == "combine":
        (directory / f"sent{rank}").touch()
        until_there(*(directory / f"sent{other}" for other in range(LOST)))
    seen = [handle[0].clone(), handle[1].clone()]
    for zero_copy in (False, True, False):  # the second and the third without anybody to lose
        if zero_copy:
            buffer.get_next_combine_buffer(handle).copy_(rows)
        out, *_ = buffer.combine(rows, ids, weights, handle, zero_copy=zero_copy)
        assert torch.equal(out, (x.float() * (weights * there).sum(dim=1, keepdim=True)).bfloat16())
        ids[ids // EXPERTS >= LOST] = -1  # as DeepEP's test does, in the tensor that the dispatch was given
    assert counts.sum() == (seen[1] & 0xFFFFFFFF).sum()
    assert all(torch.equal(before, after) for before, after in zip(seen, handle[:2], strict=True))
    status = torch.zeros(MOST, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    assert status.tolist() == [0] * LOST + [1]
    exact_round(buffer)
    return [float(out.sum())]


@pytest.mark.parametrize(("when", "how"), [("dispatch", "killed"), ("combine", "killed"), ("combine", "leaves")])
def test_a_call_that_loses_a_rank_goes_on(when: str, how: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(MOST, lose_a_rank, tmp_path, when, how)
    found = ranks.results(LOST)
    assert all(isinstance(found[rank], list) for rank in range(LOST)), found


def test_one_rank_connects_nobody() -> None:
    """As NIXL's plan of one rank."""
    buffer = open_buffer(dist.HashStore(), 0)
    exact_round(buffer)
    exact_round(buffer, zero_copy=True)
    for dtype, options in (
        (torch.float32, {}),
        (torch.float32, {"round_scale": True}),
        (torch.int32, {"round_scale": True, "use_ue8m0": True}),
    ):
        (_, scales), *_ = buffer.dispatch(torch.ones(1, 512).bfloat16(), torch.tensor([[0]]), 1, **options)
        assert scales.dtype is dtype
    buffer.barrier()
    buffer.destroy()


def until_there(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def member(process: int, _: Any, directory: Path) -> int:
    """Rank of its number; the last process replaces rank 1, which is killed."""
    store = dist.FileStore(str(directory / "elastic"), -1)
    rank = process if process < 3 else 1
    if process == 3:
        until_there(directory / "killed")
    buffer = open_buffer(store, rank)
    if process < 3:
        buffer.connect_ranks([0, 1, 2])
        exact_round(buffer)
        (directory / f"made{process}").touch()
        status = torch.zeros(MOST, dtype=torch.int32)
        while not status[1]:
            with contextlib.suppress(moecomm.RoundFailed):
                exact_round(buffer)
            buffer.query_mask_buffer(status)
        assert status.tolist() == [0, 1, 0, 1]
        exact_round(buffer)  # without the rank that is masked now
        buffer.disconnect_ranks([1])
    buffer.connect_ranks([1] if process < 3 else [0, 1, 2])
    for _ in range(20):
        exact_round(buffer)
    buffer.barrier()
    buffer.destroy()
    return rank


def test_a_killed_rank_is_masked_and_replaced(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(4, member, tmp_path)
    until_there(*(tmp_path / f"made{process}" for process in range(3)))
    ranks.kill(1)
    (tmp_path / "killed").touch()
    assert ranks.results(3) == {0: 0, 2: 2, 3: 1}


def planned(process: int, _: Any, directory: Path, device: str) -> list[int]:
    """NIXL's plan: two ranks, then four, of which two are killed; 0 and 3 are left.  Returns the mask."""
    if device == "cuda":
        torch.cuda.set_device(process % torch.cuda.device_count())
    buffer = open_buffer(dist.FileStore(str(directory / "elastic"), -1), process, timeout_ms=60_000)

    def rounds() -> None:
        for number in range(20):
            exact_round(buffer, zero_copy=number % 2 == 1, device=device)

    if process < 2:
        buffer.connect_ranks([0, 1])
        rounds()
        (directory / f"two{process}").touch()
        buffer.connect_ranks([2, 3])
    else:
        until_there(directory / "two0", directory / "two1")
        buffer.connect_ranks(range(MOST))
    rounds()
    (directory / f"four{process}").touch()
    status = torch.zeros(MOST, dtype=torch.int32, device=device)
    while status.sum() < 2:
        with contextlib.suppress(moecomm.RoundFailed):
            exact_round(buffer, device=device)
        buffer.query_mask_buffer(status)
    masked = status.tolist()
    rounds()
    buffer.disconnect_ranks([1, 2])
    rounds()
    buffer.connect_ranks([])  # in windows without the others
    rounds()
    buffer.barrier()
    buffer.destroy()
    return masked


def follow_the_plan(ranks: Ranks, directory: Path, device: str) -> None:
    ranks.start(4, planned, directory, device)
    until_there(*(directory / f"four{process}" for process in range(4)))
    for rank in (1, 2):
        ranks.kill(rank)
    assert ranks.results(2, timeout_s=120) == {0: [0, 1, 1, 0], 3: [0, 1, 1, 0]}


@pytest.mark.timeout(150)
def test_the_published_plan(ranks: Ranks, tmp_path: Path) -> None:
    follow_the_plan(ranks, tmp_path, "cpu")


def test_a_meeting_forgets_who_left_a_ticket_and_went() -> None:
    store, found = dist.HashStore(), []
    with pytest.raises(moecomm.Timeout, match="rank 0 did not come"):
        meet(store, 1, [0, 1], 0.01)
    with pytest.raises(moecomm.Timeout, match="rank 1 did not come"):
        meet(store, 0, [0, 1], 0.01)  # it calls to a ticket that nobody holds
    first = threading.Thread(target=lambda: found.append(meet(store, 0, [0, 1], 20)))
    first.start()
    found.append(meet(store, 1, [0, 1], 20))
    first.join()
    assert found[0] == found[1]


def test_what_is_not_supported_or_out_of_turn_is_named() -> None:
    store = dist.HashStore()
    for options in ({"comm": object()}, {"low_latency_mode": False}, {"disable_ll_nvlink": True}, {}):
        with pytest.raises(moecomm.Unsupported):
            nixl_ep.Buffer(**({"tcp_store_group": store} if options else {}), **options)
    buffer = nixl_ep.Buffer(rank=0, tcp_store_group=store)
    with pytest.raises(moecomm.BadInput, match="update_memory_buffers"):
        buffer.connect_ranks([0])
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(moecomm.BadInput, match="update_memory_buffers"):
        buffer.dispatch(torch.zeros(1, HIDDEN).bfloat16(), ids, 1)
    buffer.update_memory_buffers(2, EXPERTS, 0)
    for wrong in ([2], 5, "x", [True]):
        with pytest.raises(moecomm.BadInput, match="0 to 1"):
            buffer.connect_ranks(wrong)
    for given in ({"tcp_store_group": 5}, {"group": "x"}, {"tcp_store_group": store, "rank": -1}):
        with pytest.raises(moecomm.BadInput):
            nixl_ep.Buffer(**given)
    buffer.set_tcp_store_group(None)
    with pytest.raises(moecomm.BadInput, match="set_tcp_store_group"):
        buffer.connect_ranks([0])
    buffer.set_tcp_store_group(store)
    buffer.connect_ranks([0, 1], activate=False)
    buffer.connect_ranks([0])
    with pytest.raises(moecomm.BadInput, match="before connect_ranks"):
        buffer.update_memory_buffers(2, EXPERTS, 0)
    with pytest.raises(moecomm.BadInput, match="this rank"):
        buffer.disconnect_ranks([0])
    with pytest.raises(moecomm.BadInput, match="a connected rank"):
        buffer.update_mask_buffer(1, True)
    with pytest.raises(moecomm.BadInput, match="num_experts"):
        buffer.dispatch(torch.zeros(1, HIDDEN).bfloat16(), ids, 1, EXPERTS - 1)
    with pytest.raises(moecomm.BadInput, match="mask_status"):
        buffer.query_mask_buffer(torch.zeros(3, dtype=torch.int32))
    assert nixl_ep.Buffer.get_rdma_size_hint(8, HIDDEN, 2, 4) > 0
    buffer.destroy()
    with pytest.raises(moecomm.Closed):
        buffer.connect_ranks([0])
