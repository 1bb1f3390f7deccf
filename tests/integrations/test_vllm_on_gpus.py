"""Prepare and finalize on GPUs: shared experts beside a combine, and the batched format in a graph."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.integrations import vllm_stub as stub
from tests.integrations.vllm_ranks import Rank, finalized


def run(gpu_ranks: Any, body: Any) -> dict[int, Any]:
    """Kernels are compiled, the first time: longer than the minute that ranks usually have."""
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, body)
    return gpu_ranks.results(count, timeout_s=280)


def _beside(rank: int, group: Any) -> list[bool]:
    """Work between finalize_async and its wait is on the stream that the combine is beside."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    sys.modules.update(stub.modules(stub.MicroBatches()))
    mine = Rank(group, dtype=torch.bfloat16, device=str(device))
    same = []
    for kind in ("standard", "batched") * 3:
        both = getattr(mine, kind)
        x, _, meta, ids, weights = both.prepare(**mine.arguments())
        out = torch.full_like(mine.x, torch.nan)
        reduce = stub.TopKWeightAndReduceDelegate()
        if kind == "batched":
            y = mine.batched_experts(x, meta.expert_num_tokens)
            wait, _ = both.finalize_async(out, y, mine.weights, mine.ids, False, reduce)
        else:
            y = mine.standard_experts(x, ids)
            wait = both.finalize_async(out, y, weights, ids, False, reduce)
        shared = mine.x.float() @ torch.eye(mine.x.shape[1], device=device)
        wait()
        wanted = mine.wanted()
        close = (out.float() - wanted.float()).abs() <= 2.0**-7 * (wanted.float().abs() + 1)
        same += [bool(close.all()), torch.equal(shared, mine.x.float())]
        same.append(torch.equal(finalized(mine, kind, both.prepare(**mine.arguments())), out))
    mine.close()
    return same


@pytest.mark.gpu2
def test_shared_experts_run_beside_the_combine(gpu_ranks: Any) -> None:
    for same in run(gpu_ranks, _beside).values():
        assert same == [True] * 18


def _graph(rank: int, group: Any) -> list[bool]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    sys.modules.update(stub.modules(stub.MicroBatches()))
    mine = Rank(group, device=str(device))
    scale = torch.arange(1, mine.local + 1, device=device) + mine.rank * mine.local
    out = torch.empty_like(mine.x)

    def step() -> None:
        x, *_ = mine.batched.prepare(**mine.arguments())
        y = x * scale.view(-1, 1, 1)
        mine.batched.finalize(out, y, mine.weights, mine.ids, False, stub.TopKWeightAndReduceDelegate())

    step()  # opens the Buffer, and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    same = []
    for _ in range(5):
        mine.x.add_(1)
        mine.ids.copy_(torch.where(mine.ids < 0, -1, (mine.ids + 1) % 8))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        same.append(torch.equal(out, mine.wanted()))
    mine.close()
    return same


@pytest.mark.gpu2
def test_the_batched_format_runs_in_a_graph(gpu_ranks: Any) -> None:
    for same in run(gpu_ranks, _graph).values():
        assert same == [True] * 5
