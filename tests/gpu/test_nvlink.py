"""One process a GPU, over every backend and kind of windows: random cases, a killed rank, a silent rank, graphs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import moecomm
import moecomm.backends
from moecomm.backends import nvshmem_runtime
from moecomm.backends.windows import nccl
from moecomm.testing import check_case_on_rank, random_case

from ..conftest import GPU_COUNTS, Ranks, gpu_count, share_cores
from .test_virtual_ranks import direct_bytes

# Windows of lsa, or a backend, with its way behind it; then so many domains, and the backend puts between them.
# The kernels of two of SIZES are those of virtual ranks; those of several domains are compiled for these two.
KINDS = ["vmm", "nccl", "vmm, 2 domains", "vmm, 4 domains", "gin", "nvshmem", "gin, 2 domains", "gin, 4 domains"]
KINDS += ["nvshmem, 2 domains"]
KINDS += ["nvshmem network, 2 domains"]  # as if domains shared no memory, as all ranks here do
SIZES: list[dict[str, Any]] = [
    {"hidden": 7168, "num_experts": 256, "topk": 8, "max_tokens": 48, "dtype": torch.bfloat16},
    # Some of 2, 4 and 8 ranks have an expert more than the others.
    {"hidden": 144, "num_experts": 15, "topk": 6, "max_tokens": 33, "dtype": torch.bfloat16},
    {"hidden": 2880, "num_experts": 128, "topk": 4, "max_tokens": 150, "dtype": torch.float16},
]
SMALL: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 2, "max_tokens": 64}


def random_seeds(sizes: dict[str, Any], cases: int, first: int = 0) -> range:
    """The cases that some of SIZES get, where `cases` are wanted: all of them the one whose reference takes no time."""
    return range(first, first + (cases if sizes is SIZES[1] else max(min(cases // 12, 25), cases // 150)))


def _how(kind: str) -> str:
    return kind.partition(",")[0].split()[0]


def backend_of(kind: str) -> str:
    how = _how(kind)
    return how if how in moecomm.backends.NAMES else "lsa"


def open_kind(group: Any, kind: str, **sizes: Any) -> moecomm.Buffer:
    first, _, domains = kind.partition(",")
    how, _, way = first.partition(" ")
    near = max(1, group.size() // int(domains.split()[0])) if domains else group.size()
    if how == "nvshmem" and way:
        nvshmem_runtime.scaleup_ranks = lambda: near
    backend = backend_of(kind)
    if backend == "lsa":
        os.environ["MOECOMM_WINDOW"] = how
    buffer = moecomm.Buffer(group, **sizes, backend=backend, domain_ranks=near)
    assert buffer.backend == f"lsa/{how}" or buffer.backend.startswith(f"{how}/")
    assert buffer.domain_ranks == near
    assert how != "nvshmem" or buffer.backend == f"nvshmem/{way or 'p2p'}"
    return buffer


def require(kind: str) -> str:
    """Return a kind that can run here, or skip."""
    how = _how(kind)
    reason = nccl.missing() if how == "nccl" else ""
    if how in moecomm.backends.NAMES:
        reason = moecomm.backends.missing(how)
    if reason:
        pytest.skip(f"{kind}: {reason}")
    return kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One that can run here."""
    return require(request.param)


def random_cases(rank: int, group: Any, kind: str, cases: int, seed: int) -> str:
    """Across domains all rows of the first of SIZES go straight, and of some ranks those of the second."""
    share_cores(group.size())
    for sizes in SIZES[:2] if "domains" in kind else SIZES:
        if "domains" in kind and sizes is SIZES[1]:
            moecomm.backends.load(backend_of(kind)).direct_bytes = direct_bytes  # type: ignore[method-assign]
        with open_kind(group, kind, **sizes, timeout_s=60) as buffer:
            for done, number in enumerate(random_seeds(sizes, cases, seed * 1_000_000)):
                if rank == 0 and done and done % 1000 == 0:  # pytest -s shows how far a long run has come
                    print(f"{kind}: {done} cases of {sizes['hidden']} columns", flush=True)
                check_case_on_rank(buffer, random_case(number, ranks=group.size(), **sizes, few_kernels=True))
    return "done"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", GPU_COUNTS)
def test_random_cases_match_the_reference(
    gpu_ranks: Ranks, kind: str, count: int, request: pytest.FixtureRequest
) -> None:
    cases, seed = request.config.getoption("--gpu-cases"), request.config.getoption("--seed")
    gpu_ranks.start(count, random_cases, kind, cases, seed)
    assert gpu_ranks.results(count, timeout_s=800 + cases / 10) == dict.fromkeys(range(count), "done")


def routing(rank: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return {
        "x": torch.randn(64, 64, generator=g).bfloat16().cuda(),
        "topk_idx": torch.rand(64, 8, generator=g).argsort(dim=1)[:, :2].cuda(),
        "topk_weights": (torch.randint(1, 9, (64, 2), generator=g) / 8).cuda(),  # sums are exact
    }


def _until_a_peer_dies(rank: int, group: Any, kind: str, how: str) -> Any:
    buffer = open_kind(group, kind, **SMALL, timeout_s=3)
    mine = routing(rank)
    routed = buffer.dispatch(**mine, sync=True)
    want = buffer.combine(routed.x, routed.handle)
    buffer.check()
    if rank == 1 and how == "silent":
        time.sleep(60)
    last = time.monotonic()
    try:
        for number in range(1_000_000):
            if rank == 1 and number == 100:
                os.kill(os.getpid(), signal.SIGKILL)
            last = time.monotonic()
            routed = buffer.dispatch(**mine, sync=True)
            out = buffer.combine(routed.x, routed.handle)
            buffer.check()
            assert torch.equal(out, want)
    except moecomm.RoundFailed as error:
        took = time.monotonic() - last
        alive = torch.ones(8, device="cuda").sum().item()
        failure = type(error).__name__, error.peer
    begin = time.monotonic()
    buffer.shrink()
    resumed = time.monotonic() - begin
    exact = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
    for _ in range(100):
        routed = buffer.dispatch(**mine, sync=True)
        assert torch.equal(buffer.combine(routed.x, routed.handle, wire="exact"), exact.bfloat16())
    buffer.close()
    return *failure, took, alive, resumed


@pytest.mark.gpu2
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_survivors_name_the_rank_and_go_on(gpu_ranks: Ranks, kind: str, how: str) -> None:
    count = gpu_count()
    gpu_ranks.start(count, _until_a_peer_dies, kind, how)
    for rank, result in gpu_ranks.results(count - 1, timeout_s=120).items():
        assert not isinstance(result, BaseException), result
        name, peer, seconds, alive, resumed = result
        assert rank != 1 and peer == 1 and alive == 8
        assert name == ("PeerLost" if how == "killed" else "Timeout")
        assert seconds < (1.5 if how == "killed" else 4.0)
        print(f"rank {rank}: {name} after {seconds:.3f} s, resumed in {resumed:.3f} s")


def _replay(rank: int, group: Any, kind: str) -> int:
    """Return how many values of all replays were wrong.  A replay has two pairs of rounds, and compares both."""
    with open_kind(group, kind, **SMALL, timeout_s=20) as buffer:
        mine = routing(rank)
        for _ in range(2):
            routed = buffer.dispatch(**mine)
            buffer.combine(routed.x, routed.handle)
        buffer.check()
        want = torch.empty_like(mine["x"])
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = []
            for _ in range(2):
                here = buffer.dispatch(**mine)
                outs.append(buffer.combine(here.x, here.handle, wire="exact"))  # want rounds once
            for out in outs:
                wrong += (out != want).sum()
                out.fill_(torch.nan)  # what a later replay leaves out is wrong there
        # GIN's proxy takes ten milliseconds a round.
        for seed in range(5_000 if kind in ("vmm", "nccl") else 500):
            if seed % 25 == 0:
                for name, value in routing(seed + rank).items():
                    mine[name].copy_(value)
                want.copy_(mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True))
            graph.replay()
        buffer.check()
        return int(wrong)


@pytest.mark.gpu2
def test_graph_replay(gpu_ranks: Ranks, kind: str) -> None:
    count = gpu_count()
    assert gpu_ranks.run(count, _replay, kind) == [0] * count
