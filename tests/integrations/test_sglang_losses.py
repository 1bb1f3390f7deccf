"""A rank is lost, and ranks join, while SGLang serves over NIXL-EP: its calls in its order, on CPU ranks.

The rest of SGLang's elastic path, and why it does not run here, is in docs/losing_a_rank_while_serving.md.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm.compat.nixl_ep import Buffer, topk_idx_t
from tests.conftest import Ranks
from tests.integrations.test_vllm_losses import until_there

RANKS, LOCAL, LOGICAL, HIDDEN, TOPK, TOKENS = (
    4,
    2,
    4,
    128,
    2,
    5,
)  # expert p of RANKS * LOCAL is a replica of p % LOGICAL
STEPS, LOST = 20, 3


class Server:
    """A rank of SGLang: its NixlEPBuffer, the low-latency dispatcher over it, and its ElasticEPState.

    Args:
        store: its global TCPStore.
        rank: among all that may come.
        ranks: that are connected at first.
        hooks: a call is received by its hook, else by its event.
    """

    def __init__(self, store: Any, rank: int, ranks: int, hooks: bool) -> None:
        self.store, self.rank, self.hooks, self.ranks = store, rank, hooks, ranks
        hint = Buffer.get_rdma_size_hint(TOKENS, HIDDEN, RANKS, RANKS * LOCAL)
        self.buffer = Buffer(rank=rank, tcp_store_group=store)
        self.buffer.update_memory_buffers(num_ranks=RANKS, num_experts_per_rank=LOCAL, num_rdma_bytes=hint)
        self._connect(range(ranks))
        self.mask = torch.zeros(RANKS, dtype=torch.int32)
        self.active = torch.ones(RANKS, dtype=torch.int32)
        self.active[ranks:] = 0
        self.last = self.active.clone()

    def _connect(self, ranks: range) -> None:
        self.buffer.set_tcp_store_group(self.store)
        self.buffer.connect_ranks(list(ranks))
        assert self.buffer.group_size == RANKS

    def scale(self, ranks: int) -> None:
        """As on_scale() and the next look at the buffer: ranks that are there connect the new ones."""
        self._connect(range(self.ranks, ranks))
        self.active[self.ranks : ranks] = 1
        self.last, self.ranks = self.active.clone(), ranks

    def step(self, number: int) -> None:
        """Make a forward pass, and after a fault another one with other replicas.  The last has to be exact."""
        g = torch.Generator().manual_seed(RANKS * number + self.rank)
        x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=g).bfloat16()
        logical = torch.rand(TOKENS, LOGICAL, generator=g).argsort(dim=1)[:, :TOPK]
        weights = torch.randint(1, 4, (TOKENS, TOPK), generator=g).float()
        out = self._forward(x, logical, weights)
        if not torch.equal(self.active, self.last):
            self.last = self.active.clone()
            out = self._forward(x, logical, weights)
        factors = (weights * (logical + 1)).sum(dim=1, keepdim=True)
        assert torch.equal(out, (x.float() * factors).bfloat16()), (self.rank, number)

    def _forward(self, x: torch.Tensor, logical: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        replicas = [
            [p for p in range(e, RANKS * LOCAL, LOGICAL) if self.active[p // LOCAL]] for e in range(LOGICAL)
        ]  # as its planner gives them to the ranks that are active
        ids = torch.tensor([[replicas[int(e)][t % len(replicas[int(e)])] for e in of] for t, of in enumerate(logical)])
        ids = ids.to(topk_idx_t)
        how = {"async_finish": not self.hooks, "return_recv_hook": self.hooks}
        scales = {"round_scale": False, "use_ue8m0": False}
        rows, counts, handle, event, hook = self.buffer.dispatch(
            x, ids, TOKENS, LOCAL * self.ranks, use_fp8=False, **how, **scales
        )
        hook() if hook is not None else event.current_stream_wait()
        y = torch.full_like(rows, torch.nan)
        for slot, count in enumerate(counts.tolist()):
            y[slot, :count] = rows[slot, :count] * ((self.rank * LOCAL + slot) % LOGICAL + 1)
        out, event, hook = self.buffer.combine(x=y, topk_idx=ids, topk_weights=weights, handle=handle, **how)
        self.buffer.query_mask_buffer(self.mask)  # ahead of the hook
        self.active[: self.ranks].copy_(1 - self.mask[: self.ranks])
        hook() if hook is not None else event.current_stream_wait()
        return out


def serve_and_die(rank: int, _: Any, directory: Path, hooks: bool) -> list[int]:
    """Serve all steps; the last rank kills itself between two of them.  Returns the active ranks."""
    server = Server(dist.FileStore(str(directory / "nixl"), -1), rank, RANKS, hooks)
    for number in range(STEPS):
        if number == STEPS // 2:
            (directory / f"half{rank}").touch()
            until_there(*(directory / f"half{other}" for other in range(RANKS)))
            if rank == LOST:
                os.kill(os.getpid(), signal.SIGKILL)
        server.step(number)
    server.buffer.destroy()
    return server.active.tolist()


@pytest.mark.parametrize("hooks", [False, True])
def test_requests_go_on_when_a_rank_is_killed(ranks: Ranks, tmp_path: Path, hooks: bool) -> None:
    """All ranks that are left find it inactive in the same pass, and repeat that pass."""
    ranks.start(RANKS, serve_and_die, tmp_path, hooks)
    assert ranks.results(RANKS - 1) == {rank: [1, 1, 1, 0] for rank in range(RANKS - 1)}


@pytest.mark.parametrize("hooks", [False, True])
def test_ranks_join_while_others_serve(hooks: bool) -> None:
    store, served, grown = dist.HashStore(), threading.Barrier(2), threading.Barrier(RANKS)

    def body(rank: int) -> None:
        server = Server(store, rank, 2 if rank < 2 else RANKS, hooks)
        if rank < 2:
            for number in range(STEPS // 2):
                server.step(number)
            served.wait(30)
            server.scale(RANKS)
        for number in range(STEPS // 2, STEPS):
            server.step(number)
        assert server.active.tolist() == [1] * RANKS
        grown.wait(30)
        server.buffer.destroy()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(body, range(RANKS)))
