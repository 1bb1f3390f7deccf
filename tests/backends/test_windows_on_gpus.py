"""Sessions of the lsa backend on real GPUs: what one rank stores, the others load; no kernel of ours is needed."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm import _native
from moecomm.backends import between_rounds, lsa
from moecomm.backends.windows import nccl
from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.rendezvous import ProcessGroup
from tests.backends.conftest import run_ranks

WORDS = 256  # int32 a rank writes to each of its peers
INT, CUDA = 0, 2  # DLPack's codes


def exercise(group: Rendezvous, device: int) -> str:
    """Opens, writes to everybody, reads what everybody wrote, closes in rank order; returns the name of the session."""
    shape = _native.Shape(
        ranks=group.ranks, slots=64, topk=2, max_tokens=64, ring_tokens=32, staged_row_bytes=256, heap_bytes=8 << 20
    )
    session = lsa.open(group, shape, torch.device("cuda", device), 20.0)
    name, context, layout = session.name, session.context, session.context.window
    pinned, copies = cuda_driver.PinnedMemory(64 << 10), cuda_driver.CopyStream()
    own = context.peers[group.rank]

    copies.to_host(pinned.address, own, min(layout.staging, 64 << 10))
    copies.wait()
    assert not any(pinned.read(0, min(layout.staging, 64 << 10))), "control memory starts as zeros"
    group.all_gather(b"\0")

    block = _native.Arena(layout.heap, shape.heap_bytes).allocate(group.ranks * WORDS * 4)
    offsets = [int.from_bytes(data, "little") for data in group.all_gather(block.offset.to_bytes(8, "little"))]
    for peer in range(group.ranks):
        words = torch.arange(WORDS, dtype=torch.int32) + 1000 * group.rank + 100_000 * peer
        pinned.write(0, words.numpy().tobytes())
        copies.to_device(context.peers[peer] + offsets[peer] + group.rank * WORDS * 4, pinned.address, WORDS * 4)
        copies.wait()
    group.all_gather(b"\0")
    capsule = block.tensor(own + block.offset, (group.ranks, WORDS), INT, 32, CUDA, device, session.owner)
    tensor = torch.from_dlpack(capsule)
    senders = torch.arange(group.ranks, dtype=torch.int32)[:, None]
    want = torch.arange(WORDS, dtype=torch.int32)[None] + 1000 * senders + 100_000 * group.rank
    assert torch.equal(tensor.cpu(), want)

    for leaving in range(group.ranks):
        if leaving == group.rank:
            session.close()
            session.close()
        group.all_gather(b"\0")
        if leaving < group.rank:
            copies.to_host(pinned.address, own + _native.leave_offset(layout, group.ranks, 0, leaving), 64)
            copies.wait()
            tagged_words = between_rounds.tagged_words(0, layout.num_tagged_words)
            assert pinned.read(0, 64) == tagged_words[:64], "the peer learns that this rank has left"
        group.all_gather(b"\0")
    del capsule, block
    gc.collect()
    assert torch.equal(tensor.cpu(), want), "a tensor keeps its memory"
    return name


@pytest.mark.gpu1
@pytest.mark.parametrize("ranks", [1, 4])
def test_virtual_ranks_on_one_gpu(ranks: int) -> None:
    before = torch.cuda.mem_get_info(0)[0]
    assert run_ranks(ranks, lambda group: exercise(group, 0)) == ["lsa/local"] * ranks
    gc.collect()
    assert before - torch.cuda.mem_get_info(0)[0] < 64 << 20, "windows are freed with their last tensor"


@pytest.mark.gpu2
def test_ranks_of_one_process_on_two_gpus() -> None:
    assert run_ranks(4, lambda group: exercise(group, group.rank % 2)) == ["lsa/local"] * 4


def _rank_main(queue: Any, store: str, rank: int, ranks: int) -> None:
    result: Any
    try:
        torch.cuda.set_device(rank)
        timeout = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
        )
        result = exercise(ProcessGroup(dist.group.WORLD), rank)
    except Unsupported as error:
        result = error
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        result = traceback.format_exc()
    queue.put((rank, result))


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["nccl", "vmm"])
def test_processes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_WINDOW", kind)
    ranks = min(torch.cuda.device_count(), 8)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    queue = context.Queue()
    processes = [context.Process(target=_rank_main, args=(queue, str(tmp_path / "s"), r, ranks)) for r in range(ranks)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=240) for _ in range(ranks))
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    if kind == "nccl" and (reason := nccl.missing()):
        assert all(isinstance(found[rank], Unsupported) and reason in str(found[rank]) for rank in range(ranks))
    else:
        assert [found[rank] for rank in range(ranks)] == [f"lsa/{kind}"] * ranks
