"""The calls of DeepXTrace, and what it does with the tensors that deep_ep adds waits to.

DeepXTrace keeps one int64 `[R]` tensor for each low-latency call, passes it in every step, gathers both from all ranks
on rank 0 (row: the rank that waits; column: the rank that it waits for), and sets them to zero in place.  It names a
rank whose column has a mean of more than 3 times that of all columns.  It can do so in a thread beside the calls.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from moecomm.compat.deep_ep import Buffer

from ..conftest import Ranks

RANKS, LATE, STEPS = 4, 2, 4
TOKENS, HIDDEN, EXPERTS, TOPK = 8, 128, 8, 2
LATE_S, THRESHOLD, GATHERS = 0.1, 3.0, 10


class Program:
    """A rank of an engine with a probe: buffer, tensors and steps."""

    def __init__(self, rank: int, group: Any, device: str = "cpu") -> None:
        self.rank, self.group, self.device = rank, group, device
        size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.size(), EXPERTS)
        self.buffer = Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=EXPERTS // group.size())
        # An engine asks these whether it needs another one.
        assert self.buffer.group is group and self.buffer.low_latency_mode and self.buffer.num_rdma_bytes >= size
        self.dispatch_waits, self.combine_waits = torch.zeros(2, RANKS, dtype=torch.int64, device=device).unbind()
        self.received = torch.zeros(EXPERTS // RANKS, dtype=torch.int32, device=device)

    def step(self, late_s: float = 0.0) -> None:
        hidden = torch.full((TOKENS, HIDDEN), 1.0 + self.rank, dtype=torch.bfloat16, device=self.device)
        ids = (torch.arange(TOKENS * TOPK, device=self.device).view(TOKENS, TOPK) + self.rank) % EXPERTS
        weights = torch.full((TOKENS, TOPK), 0.5, device=self.device)
        time.sleep(late_s)
        (rows, scales), _, handle, _, _ = self.buffer.low_latency_dispatch(
            hidden,
            ids,
            TOKENS,
            EXPERTS,
            cumulative_local_expert_recv_stats=self.received,
            dispatch_wait_recv_cost_stats=self.dispatch_waits,
            use_fp8=True,
        )
        done = (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).bfloat16()
        combined, *_ = self.buffer.low_latency_combine(
            done, ids, weights, handle, use_logfmt=False, combine_wait_recv_cost_stats=self.combine_waits
        )
        assert torch.allclose(combined, hidden, rtol=0.05, atol=0)

    def gathered(self, group: Any) -> torch.Tensor | None:
        """Both matrices, on rank 0; waits are counted from zero again."""
        stats = torch.stack([self.dispatch_waits, self.combine_waits], dim=0)
        rows = [torch.zeros_like(stats) for _ in range(RANKS)] if self.rank == 0 else None
        dist.gather(stats, gather_list=rows, group=group, dst=0)
        self.dispatch_waits.zero_()
        self.combine_waits.zero_()
        return None if rows is None else torch.stack(rows).transpose(0, 1)


def slow_columns(matrix: torch.Tensor) -> list[int]:
    means = matrix.double().mean(dim=0)
    return torch.nonzero(means > THRESHOLD * means.mean()).flatten().tolist()


def in_step(rank: int, group: Any) -> Any:
    """One rank is late in the second half of the steps."""
    program = Program(rank, group)
    found = []
    for late_s in (0.0, LATE_S):
        for _ in range(STEPS):
            program.step(late_s if rank == LATE else 0.0)
        found.append(program.gathered(group))
    assert program.received.tolist() == [2 * STEPS * TOKENS * RANKS * TOPK // EXPERTS] * (EXPERTS // RANKS)
    program.buffer.destroy()
    if rank != 0:
        return None
    (dispatches, combines), (late, _) = found
    for matrix in (dispatches, combines, late):
        assert matrix.shape == (RANKS, RANKS) and matrix.dtype == torch.int64 and bool((matrix >= 0).all())
        assert matrix.diagonal().tolist() == [0] * RANKS, "a rank does not wait for itself"
    waited = [int(late[other, LATE]) for other in range(RANKS) if other != LATE]
    assert min(waited) > 0.5e9 * STEPS * LATE_S, "nanoseconds of this period alone"
    assert int(dispatches[:, LATE].max()) < min(waited)
    return slow_columns(late)


def test_steps_that_diagnose_in_turn(ranks: Ranks) -> None:
    assert ranks.run(RANKS, in_step) == [[LATE], None, None, None]


def beside(rank: int, group: Any) -> int:
    """Another thread gathers over a group of its own while this one makes steps."""
    own, done = dist.new_group(list(range(RANKS)), backend="gloo"), 0
    stepped, gathered = threading.Event(), threading.Event()
    program = Program(rank, group)

    def diagnose() -> None:
        nonlocal done
        for _ in range(GATHERS):
            assert stepped.wait(30)
            stepped.clear()
            matrices = program.gathered(own)
            assert matrices is None or (bool((matrices >= 0).all()) and matrices.shape == (2, RANKS, RANKS))
            done += 1
        gathered.set()

    thread = threading.Thread(target=diagnose)
    thread.start()
    ended = torch.zeros(1, dtype=torch.int32)
    while not ended.item():  # all ranks make the same steps
        program.step()
        stepped.set()
        ended.fill_(int(gathered.is_set()))
        dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=group)
    thread.join()
    program.buffer.destroy()
    return done


def test_a_thread_that_diagnoses_beside_steps(ranks: Ranks) -> None:
    assert ranks.run(RANKS, beside) == [GATHERS] * RANKS
