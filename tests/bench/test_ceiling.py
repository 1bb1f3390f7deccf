"""All-to-all: every way moves every byte to its place, between CPU ranks and between GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm_bench import ceiling
from moecomm_bench.receive_buffer import ReceiveBuffer

from ..conftest import Ranks

PART = 4 * 8192


def _move(rank: int, group: Any, backend: str) -> dict[str, bool]:
    """Which ways left the right bytes: part p of what rank r sends is filled with 16 r + p + 1."""
    device = torch.device("cpu") if backend == "host" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.get_num_threads = lambda: 2  # a process of its own; OpenMP would not survive the fork with two
    found = {}
    size = group.size()
    with ReceiveBuffer(group, PART * size, backend, device) as receive_buffer:
        local = torch.empty(PART * size, dtype=torch.uint8, device=device)
        sent = (16 * rank + torch.arange(1, size + 1, dtype=torch.uint8, device=device)).repeat_interleave(PART)
        arriving = [16 * peer + rank + 1 if peer != rank else 0 for peer in range(size)]
        want = torch.tensor(arriving, dtype=torch.uint8, device=device).repeat_interleave(PART)
        for method, workers, call in ceiling.ways(receive_buffer, local, PART):
            reads = "read" in method
            source, target = (receive_buffer.tensor, local) if reads else (local, receive_buffer.tensor)
            source.copy_(sent)
            target.zero_()
            _settle(group, device)
            call()
            _settle(group, device)
            found[f"{method}, {workers}"] = torch.equal(target, want)
            _settle(group, device)
    return found


def _settle(group: Any, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group)


def test_every_byte_arrives(ranks: Ranks) -> None:
    for found in ranks.run(3, _move, "host"):
        assert found == {f"memcpy {way}, {threads}": True for way in ("write", "read") for threads in (1, 2)}


@pytest.mark.gpu2
def test_every_byte_arrives_on_gpus(gpu_ranks: Ranks) -> None:
    for found in gpu_ranks.run(2, _move, "lsa"):
        assert len(found) == 4 * len(ceiling.SMS) + 2
        assert all(found.values()), [way for way, right in found.items() if not right]


def test_the_best_way_comes_first_by_its_slowest_rank() -> None:
    def rank(*us: float) -> list[dict[str, Any]]:
        return [{"method": f"way {i}", "sms": 8, "bytes": 3000, "us": [t] * 3} for i, t in enumerate(us)]

    merged = ceiling.merge([rank(1.0, 2.0), rank(4.0, 3.0)])
    assert [(row["method"], row["gbs"]) for row in merged] == [("way 1", 1.0), ("way 0", 0.75)]
