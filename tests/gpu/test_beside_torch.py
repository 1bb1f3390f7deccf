"""In one process with what torch does with the same libraries: symmetric memory of NVSHMEM, a process group of NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import moecomm.backends
from moecomm import rma_plugin
from moecomm.backends import nic

from ..conftest import Ranks
from .test_nvlink import SMALL, open_kind, random_cases, routing

WORDS = 4096  # of a symmetric tensor


def words_of(rank: int) -> torch.Tensor:
    return torch.arange(WORDS, dtype=torch.int32) + 1_000_000 * rank


def _joins(rank: int, group: Any, kind: str) -> str:
    # Settings of moecomm for NVSHMEM on one host without a NIC: torch initialises it here, so it must have them.
    os.environ.update(NVSHMEM_DISABLE_NVLS="1", NVSHMEM_REMOTE_TRANSPORT="none")
    symmetric.set_backend("NVSHMEM")
    symmetric.enable_symm_mem_for_group(group.group_name)
    theirs = symmetric.empty(WORDS, dtype=torch.int32, device=torch.device("cuda", rank))
    handle = symmetric.rendezvous(theirs, group.group_name)
    theirs.copy_(words_of(rank))
    torch.cuda.synchronize()
    dist.barrier(group)

    def check_theirs() -> None:
        for peer in range(group.size()):
            assert torch.equal(handle.get_buffer(peer, (WORDS,), torch.int32).cpu(), words_of(peer)), peer

    import nvshmem.bindings as bindings

    assert (bindings.my_pe(), bindings.n_pes()) == (rank, group.size()), "torch has initialised the NVSHMEM that we see"
    check_theirs()
    random_cases(rank, group, kind, cases=12, seed=0)
    check_theirs()
    dist.barrier(group)  # peers still read ours
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["nvshmem", "nvshmem, 2 domains"])
def test_nvshmem_that_torch_has_initialised_is_joined(gpu_ranks: Ranks, kind: str) -> None:
    if reason := moecomm.backends.missing("nvshmem"):
        pytest.skip(reason)
    if not symmetric.is_nvshmem_available():
        pytest.skip("this torch is built without NVSHMEM")
    count = min(4, torch.cuda.device_count())  # four have compiled their kernels: see compile.py
    gpu_ranks.start(count, _joins, kind)
    assert gpu_ranks.results(count, timeout_s=500) == dict.fromkeys(range(count), "done")


def check_sums(group: Any) -> None:
    """All-reduces of whole numbers, by whichever ways NCCL has for few bytes and for many."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for count in (1, 5000, 1 << 22):
        values = torch.arange(count, device="cuda") % 1000
        mine = (values * (rank + 1)).float()
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, (values * (ranks * (ranks + 1) // 2)).float()), count


def _reduces(rank: int, group: Any, first: str, kind: str) -> str:
    if first == "torch":  # NCCL looks for GIN when torch makes its communicator, and never again
        os.environ.update({} if nic.has_rdma() else rma_plugin.environment())
        theirs = dist.new_group(backend="nccl")
        check_sums(theirs)
    with open_kind(group, kind, **SMALL, timeout_s=20) as buffer:
        if first == "moecomm":  # NCCL keeps what the Buffer has set
            theirs = dist.new_group(backend="nccl")
        for seed in range(20):
            mine = routing(seed + rank)
            routed = buffer.dispatch(**mine)
            check_sums(theirs)  # between two rounds, on a stream of its own
            out = buffer.combine(routed.x, routed.handle)
            check_sums(theirs)
            buffer.check()
            want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
            torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
    check_sums(theirs)
    check_sums(dist.new_group(backend="nccl"))
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("first", "kind"), [("torch", "gin"), ("moecomm", "gin"), ("moecomm", "gin, 2 domains")], ids=str
)
def test_all_reduce_of_torch_is_right_beside_gin(gpu_ranks: Ranks, first: str, kind: str) -> None:
    if reason := moecomm.backends.missing("gin"):
        pytest.skip(reason)
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, _reduces, first, kind)
    assert gpu_ranks.results(count, timeout_s=150) == dict.fromkeys(range(count), "done")
