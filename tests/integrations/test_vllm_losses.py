"""A rank is lost while vLLM serves: its calls, on each rank alone, as its runner and its sentinel make them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.compat import nixl_ep
from tests.conftest import Ranks
from tests.integrations import vllm_stub as stub
from tests.integrations.vllm_ranks import Rank, finalized

RANKS, LOGICAL, HIDDEN, TOPK, TOKENS = 4, 4, 64, 2, 5
LOCAL = 2  # experts of a rank; expert p of 2 * LOGICAL is a replica of p % LOGICAL
STEPS, LOST = 40, 3


@pytest.fixture
def tolerant(batches: Any) -> Any:
    """vLLM with `enable_fault_tolerance`."""
    sys.modules["vllm.config"].parallel.enable_fault_tolerance = True
    return batches


def tokens(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, logical experts and weights."""
    g = torch.Generator().manual_seed(step * RANKS + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    ids = torch.rand(TOKENS, LOGICAL, generator=g).topk(TOPK).indices
    return x, ids, torch.rand(TOKENS, TOPK, generator=g)


def expert(x: torch.Tensor, logical: int) -> torch.Tensor:
    return torch.tanh(x * (logical + 1) * 0.37)


def next_tokens(rank: int, step: int) -> list[int]:
    """Return what a run without a loss gives: sums in the order of a token's experts, bit for bit."""
    x, ids, weights = tokens(rank, step)
    out = torch.zeros_like(x)
    for k in range(TOPK):
        rows = torch.stack([expert(row, int(logical)) for row, logical in zip(x, ids[:, k], strict=True)])
        out += weights[:, k : k + 1] * rows
    return [hash(row.numpy().tobytes()) for row in out]


def physical(ids: torch.Tensor, masked: list[int]) -> torch.Tensor:
    """Return for each logical expert a replica whose rank takes part, in turn: as vLLM's router does with EPLB."""
    table = [[e for e in (logical, logical + LOGICAL) if not masked[e // LOCAL]] for logical in range(LOGICAL)]
    turn = torch.arange(ids.numel()).view(ids.shape)
    return torch.tensor([table[e][t % len(table[e])] for e, t in zip(ids.flatten(), turn.flatten(), strict=True)]).view(
        ids.shape
    )


class Server:
    """A rank as vLLM's runner drives it."""

    def __init__(self, group: Any, rank: int) -> None:
        from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
        from moecomm.integrations.vllm.managers import BatchedManager

        self.rank, self.manager = rank, BatchedManager(group, None)
        assert self.manager.support_fault_tolerance
        handle = self.manager.get_handle({})
        self.layer = BatchedPrepareAndFinalize(handle, max_tokens_per_rank=TOKENS, num_dispatchers=RANKS)
        self.faults = 0

    def step(self, number: int) -> list[int]:
        """Decode once.

        Raises:
            RuntimeError, MoecommError: a rank is lost, as vLLM's engine finds it.
        """
        x, logical, weights = tokens(self.rank, number)
        ids = physical(logical, self.manager.query_active_mask().tolist())
        rows, _, meta, _, _ = self.layer.prepare(x, weights, ids, RANKS * LOCAL, None, False, stub.quant_config())
        y = torch.full_like(rows, torch.nan)
        for local, count in enumerate(meta.expert_num_tokens.tolist()):
            y[local, :count] = expert(rows[local, :count], (self.rank * LOCAL + local) % LOGICAL)
        out = torch.empty_like(x)
        self.layer.finalize(out, y, weights, ids, False, stub.TopKWeightAndReduceDelegate())
        if self.manager.query_fault().item():
            raise RuntimeError(f"Fault detected. Mask: {self.manager.query_active_mask().cpu().tolist()}")
        return [hash(row.numpy().tobytes()) for row in out]


def in_place_of_vllm() -> None:
    """Put vLLM's parts into this process."""
    sys.modules.update(stub.modules(stub.MicroBatches()))
    sys.modules["vllm.config"].parallel.enable_fault_tolerance = True  # type: ignore[attr-defined]
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    stub.forget_integration()


def until_there(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def recover(server: Server, store: Any, ranks: list[int], number: int) -> int:
    """Do as vLLM's sentinel on each rank alone; then the data-parallel group is made anew, which all ranks come to.

    `ranks`: that go on.  Returns the step that they make next.
    """
    server.faults += 1
    server.manager.clean_buffers()
    server.manager.clean_buffers()
    for gone in sorted(set(range(RANKS)) - set(ranks)):  # as vLLM after 0.33 scales down
        server.manager.update_mask(gone, masked=True)
    key = f"faults/{len(ranks)}/{server.faults}"
    store.set(f"{key}/{server.rank}", str(number))
    return min(int(store.get(f"{key}/{rank}")) for rank in ranks)


def serve_and_die(rank: int, group: Any, directory: Path) -> int:
    """Serve all steps; the last rank kills itself between a dispatch and its combine.  Returns the number of faults."""
    in_place_of_vllm()
    server, store, number = Server(group, rank), dist.FileStore(str(directory / "steps"), -1), 0
    while number < STEPS:
        if (rank, number) == (LOST, STEPS // 2):
            x, ids, weights = tokens(rank, number)
            server.layer.prepare(x, weights, ids, RANKS * LOCAL, None, False, stub.quant_config())
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            assert server.step(number) == next_tokens(rank, number)
            number += 1
        except (RuntimeError, moecomm.MoecommError) as error:
            if not (isinstance(error, moecomm.PeerLost) or "Fault detected" in str(error)):
                raise
            number = recover(server, store, [0, 1, 2], number)
    assert server.manager.query_active_mask().tolist() == [0, 0, 0, 1]
    server.manager.destroy()
    return server.faults


def test_requests_go_on_when_a_rank_is_killed_in_the_middle_of_decoding(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(RANKS, serve_and_die, tmp_path)
    found = ranks.results(RANKS - 1)
    assert found == {0: 1, 1: 1, 2: 1}


def serve_and_stop(rank: int, group: Any, directory: Path) -> int:
    """Serve all steps; the last rank is stopped for longer than the others wait, and comes back."""
    in_place_of_vllm()
    from moecomm.integrations.vllm import managers

    managers._ROUND_S = 1.5  # type: ignore[attr-defined]
    server, store, number = Server(group, rank), dist.FileStore(str(directory / "steps"), -1), 0
    back = directory / "back"
    while number < STEPS:
        if (rank, number) == (LOST, STEPS // 4) and not (directory / "stops").exists():
            (directory / "stops").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            assert server.step(number) == next_tokens(rank, number)
            number += 1
        except moecomm.Excluded:
            assert rank == LOST
            back.touch()
            until_there(directory / "all")
            number = recover(server, store, [0, 1, 2, 3], number)
            continue
        except (RuntimeError, moecomm.MoecommError) as error:
            if not (isinstance(error, moecomm.Timeout) or "Fault detected" in str(error)):
                raise
            number = recover(server, store, [0, 1, 2], number)
        if rank != LOST and number == STEPS // 2 and not back.exists():
            (directory / f"half{rank}").touch()
            until_there(directory / "all")
            server.faults = 0
            number = recover(server, store, [0, 1, 2, 3], STEPS // 2)
    assert server.manager.query_active_mask().tolist() == [0] * RANKS
    server.manager.destroy()
    return number


def test_a_rank_that_was_masked_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(RANKS, serve_and_stop, tmp_path)
    until_there(*(tmp_path / f"half{rank}" for rank in range(LOST)))
    os.kill(ranks.processes[LOST].pid, signal.SIGCONT)
    until_there(tmp_path / "back")
    (tmp_path / "all").touch()
    assert ranks.results(RANKS) == dict.fromkeys(range(RANKS), STEPS)


class NixlManager:
    """The calls that vLLM's NixlEPAll2AllManager makes of a buffer, and the buffer."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store, timeout_ms=20_000)
        self.buffer.update_memory_buffers(num_ranks=RANKS, num_experts_per_rank=LOCAL, num_rdma_bytes=0)
        self.buffer.connect_ranks(range(world))
        self.connected = self.active = world

    def stage(self, world: int) -> None:
        if world > self.connected:
            self.buffer.connect_ranks(range(self.connected, world), activate=False)
            self.connected = world

    def commit(self, world: int) -> None:
        if world < self.connected:
            self.buffer.disconnect_ranks(range(world, self.connected))
        for rank in range(self.active, world):
            self.buffer.update_mask_buffer(rank, mask=False)
        self.world = self.connected = self.active = world

    @contextmanager
    def mask_remote_ranks(self) -> Iterator[None]:
        peers = [rank for rank in range(self.world) if rank != self.rank]
        for rank in peers:
            self.buffer.update_mask_buffer(rank, mask=True)
        try:
            yield
        finally:
            for rank in peers:
                self.buffer.update_mask_buffer(rank, mask=False)

    def masked(self) -> list[int]:
        status = torch.zeros(RANKS, dtype=torch.int32)
        self.buffer.query_mask_buffer(status)
        return status[: self.active].tolist()

    def step(self) -> list[int]:
        """Make a round, whose sums must be exact; return the shape of the rows, whoever takes part."""
        g = torch.Generator().manual_seed(self.rank)
        x = torch.randint(-8, 9, (TOKENS, 128), generator=g).bfloat16()
        ids = torch.rand(TOKENS, self.world * LOCAL, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
        rows, _, handle, _, hook = self.buffer.dispatch(x, ids, TOKENS, use_fp8=False, return_recv_hook=True)
        hook()
        out, *_ = self.buffer.combine(rows, ids, torch.ones(ids.shape), handle)
        there = torch.tensor(self.masked())[ids // LOCAL] == 0
        assert torch.equal(out, (x.float() * there.sum(dim=1, keepdim=True)).bfloat16())
        return list(rows.shape)


def test_elastic_ranks_warm_up_alone_and_grow_and_shrink() -> None:
    """As vLLM: two ranks serve while two others start, all warm up with the others masked, and two leave again."""
    store, warm, idle = dist.HashStore(), threading.Barrier(RANKS), threading.Barrier(RANKS)
    managers: list[NixlManager] = []

    def old(rank: int) -> None:
        manager = NixlManager(store, rank, 2)
        managers.append(manager)
        manager.step()
        manager.stage(RANKS)
        manager.step()
        idle.wait(30)  # the new ranks have warmed up meanwhile
        manager.step()
        manager.commit(RANKS)
        go_on(manager)
        manager.commit(2)
        assert manager.masked() == [0, 0]
        manager.step()
        manager.step()

    def new(rank: int) -> None:
        manager = NixlManager(store, rank, RANKS)
        managers.append(manager)
        alone(manager)
        idle.wait(30)
        go_on(manager)

    def alone(manager: NixlManager) -> None:
        with manager.mask_remote_ranks():
            assert manager.masked() == [int(rank != manager.rank) for rank in range(RANKS)]
            for _ in range(2):
                assert manager.step() == [LOCAL, RANKS * TOKENS, 128]
        assert manager.masked() == [0] * RANKS

    def go_on(manager: NixlManager) -> None:
        alone(manager)  # before they have met
        time.sleep(0.05 * manager.rank)
        assert manager.step() == [LOCAL, RANKS * TOKENS, 128]
        alone(manager)  # after it, in turns, while others wait in their rounds
        for _ in range(3):
            manager.step()
        warm.wait(30)

    with ThreadPoolExecutor(RANKS) as pool:
        for done in [pool.submit(old if rank < 2 else new, rank) for rank in range(RANKS)]:
            done.result()
    for manager in managers:
        manager.buffer.destroy()


def test_one_rank_alone_masks_another_which_comes_back(tolerant: Any) -> None:
    """Over NIXL-EP's calls, and over the manager's: repeated, and without a word of the other ranks."""
    store, idle = dist.HashStore(), threading.Barrier(RANKS)

    def over_nixl(rank: int) -> None:
        manager = NixlManager(store, rank, RANKS)
        manager.step()
        idle.wait(30)
        if rank == 0:
            for _ in range(2):
                manager.buffer.update_mask_buffer(1, mask=True)
        if rank == 1:
            with pytest.raises(moecomm.Excluded):
                manager.step()
        else:
            manager.step()
            assert manager.masked() == [0, 1, 0, 0]
        idle.wait(30)
        if rank in (1, 2):
            manager.buffer.clean_mask_buffer()
        manager.step()
        assert manager.masked() == [0] * RANKS
        manager.buffer.barrier()
        manager.buffer.destroy()

    def over_the_manager(group: Any) -> None:
        rank = Rank(group, experts=RANKS * LOCAL)
        manager, out = rank.managers[1], None
        manager.clean_buffers()  # before there is a Buffer
        assert manager.query_active_mask().tolist() == [0] * RANKS and not manager.query_fault()
        for masks in (False, True):
            if masks and rank.rank == 2:
                manager.update_mask(1)
                assert not manager.query_fault() and manager.query_active_mask().tolist() == [0, 1, 0, 0]
            if masks and rank.rank == 1:
                with pytest.raises(moecomm.Excluded):
                    rank.batched.prepare(**rank.arguments())
                assert manager.query_fault()
                continue
            out = finalized(rank, "batched", rank.batched.prepare(**rank.arguments()))
            assert masks or torch.equal(out, rank.wanted())
            assert bool(manager.query_fault()) is (masks and rank.rank != 2), "only rank 2 knows"
            idle.wait(30) if not masks else None
        idle.wait(30)
        for _ in range(2):
            manager.clean_buffers()
        assert torch.equal(finalized(rank, "batched", rank.batched.prepare(**rank.arguments())), rank.wanted())
        assert not manager.query_fault() and manager.query_active_mask().tolist() == [0] * RANKS
        with pytest.raises(moecomm.BadInput, match="this rank"):
            manager.update_mask(rank.rank)
        idle.wait(30)
        rank.close()
        rank.close()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(over_nixl, range(RANKS)))
        list(pool.map(over_the_manager, moecomm.local_ranks(RANKS)))


def test_pending_masks_end_with_the_memory_and_the_manager(tolerant: Any) -> None:
    idle = threading.Barrier(2)

    def body(group: Any) -> None:
        rank = Rank(group)
        manager = rank.managers[1]
        for _ in range(2):
            finalized(rank, "batched", rank.batched.prepare(**rank.arguments()))
        idle.wait(30)
        manager.checkpoint_prepare()
        if rank.rank == 0:
            manager.update_mask(1)
        with pytest.raises(moecomm.MemoryReleased):
            rank.batched.prepare(**rank.arguments())
        idle.wait(30)
        manager.checkpoint_restore()
        idle.wait(30)
        if rank.rank == 0:
            finalized(rank, "batched", rank.batched.prepare(**rank.arguments()))
            assert manager.query_active_mask().tolist() == [0, 1]
        else:
            with pytest.raises(moecomm.Excluded):
                rank.batched.prepare(**rank.arguments())
        manager.clean_buffers()
        rank.close()
        with pytest.raises(moecomm.Closed):
            rank.batched.prepare(**rank.arguments())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, moecomm.local_ranks(2)))
