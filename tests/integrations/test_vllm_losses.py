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
from tests.integrations.vllm_ranks import MOST, Rank, finalized

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
            assert isinstance(error, moecomm.PeerLost) or "Fault detected" in str(error), error
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
            assert isinstance(error, moecomm.Timeout) or "Fault detected" in str(error), error
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
