"""Memory that GPU ranks release and restore: graphs captured before replay after, with the same values."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers, check_case, random_case

from ..conftest import Ranks

SIZES: dict[str, Any] = {"hidden": 1024, "num_experts": 16, "topk": 4, "max_tokens": 512}
RANDOM: dict[str, Any] = {
    "ranks": 4,
    "hidden": 144,
    "num_experts": 16,
    "topk": 6,
    "max_tokens": 50,
    "dtype": torch.bfloat16,
}
CASES = 20
ROOM = 256 << 20  # of outputs, so that what is freed can be seen
TOKENS = 300


def call(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(TOKENS, 1024, generator=g).bfloat16().cuda(),
        "topk_idx": torch.rand(TOKENS, 16, generator=g).argsort(dim=1)[:, :4].cuda(),
        "topk_weights": torch.rand(TOKENS, 4, generator=g).cuda(),
    }


def wanted(given: dict[str, Any]) -> torch.Tensor:
    return given["x"].float() * given["topk_weights"].sum(dim=1, keepdim=True)


def check(out: torch.Tensor, given: dict[str, Any]) -> None:
    assert torch.allclose(out.float(), wanted(given), rtol=2**-6, atol=2**-6)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("domain_ranks", [4, 2], ids=["one-domain", "two-domains"])
def test_graphs_of_virtual_ranks_replay_after_a_pause(domain_ranks: int) -> None:
    sizes = {**SIZES, "window_bytes": ROOM, "domain_ranks": domain_ranks}
    with LocalBuffers(4, **sizes, backend="lsa", device=0, timeout_s=20) as ranks:
        calls = [call(rank) for rank in range(4)]
        routed = ranks.dispatch(calls)
        ranks.combine([{"y": here.x, "handle": here.handle} for here in routed])
        ranks.check()
        del routed
        graphs, outs, kept = [], [], []
        for buffer, given, stream in zip(ranks.buffers, calls, ranks.streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                here = buffer.dispatch(**given)
                outs.append(buffer.combine(here.x, here.handle))
            kept.append(here.x)
            graphs.append(graph)
        addresses = [x.data_ptr() for x in kept]

        def replay(seed: int) -> list[torch.Tensor]:
            for rank, given in enumerate(calls):
                for name, value in call(seed + rank).items():
                    given[name].copy_(value)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, ranks.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            ranks.check()
            for out, given in zip(outs, calls, strict=True):
                check(out, given)
            return [out.clone() for out in outs]

        before = replay(10)
        for pause in range(3):
            held = [buffer.nbytes for buffer in ranks.buffers]
            free = torch.cuda.mem_get_info(0)[0]
            ranks.release_memory()
            assert torch.cuda.mem_get_info(0)[0] - free >= 4 * ROOM - (16 << 20)
            assert all(
                buffer.nbytes <= size - ROOM + (4 << 20) for buffer, size in zip(ranks.buffers, held, strict=True)
            )
            for buffer, given in zip(ranks.buffers, calls, strict=True):
                with pytest.raises(moecomm.MemoryReleased):
                    buffer.dispatch(**given)
            ranks.restore()
            assert torch.cuda.mem_get_info(0)[0] - free <= 16 << 20
            assert [x.data_ptr() for x in kept] == addresses and not any(x.any() for x in kept)
            assert all(torch.equal(a, b) for a, b in zip(replay(10), before, strict=True))
            replay(20 + pause)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_random_rounds_between_pauses() -> None:
    """Staging, packets and signals go on where they were."""
    for domain_ranks in (4, 2):
        with LocalBuffers(**RANDOM, domain_ranks=domain_ranks, backend="lsa", device=0, timeout_s=20) as ranks:
            for number in range(CASES):
                check_case(ranks, random_case(number, **RANDOM, few_kernels=True))
                ranks.release_memory()
                ranks.restore()


def _a_pause(rank: int, group: Any) -> str:
    os.environ["MOECOMM_WINDOW"] = "vmm"
    with moecomm.Buffer(group, **SIZES, window_bytes=ROOM, backend="lsa", timeout_s=20) as buffer:
        given = call(rank)
        routed = buffer.dispatch(**given)
        buffer.combine(routed.x, routed.handle)
        buffer.check()
        del routed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            here = buffer.dispatch(**given)
            out = buffer.combine(here.x, here.handle)
        graph.replay()
        buffer.check()
        first = out.clone()
        check(first, given)
        for _ in range(3):
            free = torch.cuda.mem_get_info(rank)[0]
            buffer.release_memory()
            assert torch.cuda.mem_get_info(rank)[0] - free >= ROOM - (16 << 20)
            buffer.restore()
            out.zero_()
            graph.replay()
            buffer.check()
            assert torch.equal(out, first)
    return "done"


@pytest.mark.gpu2
def test_graphs_of_processes_replay_after_a_pause(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    assert gpu_ranks.run(count, _a_pause) == ["done"] * count


def _refused(rank: int, group: Any) -> str:
    os.environ["MOECOMM_WINDOW"] = "nccl"
    with moecomm.Buffer(group, **SIZES, backend="lsa", timeout_s=20) as buffer:
        with pytest.raises(moecomm.Unsupported, match="MOECOMM_WINDOW=vmm"):
            buffer.release_memory()
        given = call(rank)
        routed = buffer.dispatch(**given)
        check(buffer.combine(routed.x, routed.handle), given)
        buffer.check()
    return "done"


@pytest.mark.gpu2
def test_windows_of_nccl_are_refused_by_name(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    assert gpu_ranks.run(count, _refused) == ["done"] * count
