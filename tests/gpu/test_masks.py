"""Masked ranks on GPUs: rows, sums and layers have the bits of ids of -1, and captured graphs follow a mask."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import lsa
from moecomm.base.experts import experts_of
from moecomm.fused import quantize_weights
from moecomm.testing import LocalBuffers

from ..conftest import Ranks, gpu_count
from ..masks import LAYOUTS, Twins, refuses_earlier_handles
from .kills import CALLS, kill_one, sums_of, tokens_of
from .kills import SIZES as OF_KILLS

pytestmark = pytest.mark.timeout(200)
SIZES: list[dict[str, Any]] = [
    {"ranks": 4, "hidden": 1024, "num_experts": 14, "topk": 4, "max_tokens": 64},
    {"ranks": 4, "hidden": 1024, "num_experts": 16, "topk": 4, "max_tokens": 3000},
]


@pytest.fixture(params=range(len(SIZES)), ids=["few tokens", "many tokens"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    found = Twins({**SIZES[request.param], "dtype": torch.bfloat16, "timeout_s": 20.0})
    yield found
    found.close()


@pytest.mark.gpu1
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_without_masked_ranks(twins: Twins, layout: str) -> None:
    twins.rounds_while_masked(twins.masked.buffers[0].max_tokens, layout, {0: 12, 1: 13, 2: 4})


@pytest.mark.gpu1
def test_layers_without_masked_ranks(twins: Twins) -> None:
    tokens = twins.masked.buffers[0].max_tokens
    twins.layers(0, tokens)
    twins.mask([1])
    twins.layers(1, tokens)
    twins.masked.unmask([1])
    twins.layers(2, tokens)


@pytest.mark.gpu1
def test_handles_end_with_a_mask(twins: Twins) -> None:
    refuses_earlier_handles(twins, [3])


@pytest.mark.gpu1
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [64, 3000], ids=["direct", "by forwarders"])
@pytest.mark.parametrize(
    ("ranks", "domain_ranks", "steps"),
    [(4, 2, [[1], [2]]), (6, 2, [[3], [0], [2]])],
    ids=["two domains", "three domains, one of which goes"],
)
def test_others_stand_in_for_forwarders(
    layout: str, tokens: int, ranks: int, domain_ranks: int, steps: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokens > 1000:
        monkeypatch.setattr(lsa, "direct_bytes", lambda *_: 0)
    settings: dict[str, Any] = {"hidden": 1024, "topk": 4, "max_tokens": tokens, "dtype": torch.bfloat16}
    settings |= {"ranks": ranks, "domain_ranks": domain_ranks, "num_experts": 2 * ranks + 1, "timeout_s": 20.0}
    twins = Twins(settings)
    try:
        twins.rounds_after_masks(steps, tokens, {0: 2 * ranks}, layout=layout)
    finally:
        twins.close()


@pytest.mark.gpu1
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "by forwarders"])
def test_captured_rounds_over_domains_follow_a_mask(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of one rank cannot be replayed alone: each rank captures its own, and all replay together."""
    if not direct:
        monkeypatch.setattr(lsa, "direct_bytes", lambda *_: 0)
    settings: dict[str, Any] = {"hidden": 1024, "topk": 4, "max_tokens": 512, "dtype": torch.bfloat16}
    settings |= {"domain_ranks": 2, "num_experts": 16, "timeout_s": 20.0, "on_timeout": "mask"}
    with LocalBuffers(4, **settings) as buffers:
        calls = [tokens_over(rank, settings, buffers.device) for rank in range(4)]
        buffers.combine([{"y": at.x, "handle": at.handle, "wire": "exact"} for at in buffers.dispatch(calls)])
        buffers.check()
        graphs, outs = [], []
        for buffer, stream, call in zip(buffers.buffers, buffers.streams, calls, strict=True):
            graphs.append(graph := torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                routed = buffer.dispatch(**call)
                outs.append(buffer.combine(routed.x, routed.handle, wire="exact"))
        for gone in ([], [1], [1, 2]):
            if gone:
                buffers.mask(gone[-1:])
            for buffer, stream in zip(buffers.buffers, buffers.streams, strict=True):
                with torch.cuda.stream(stream):
                    graphs[buffer.rank].replay()
            buffers.check()
            lost = [expert for rank in gone for expert in experts_of(rank, 16, 4)]
            for buffer in buffers.buffers:
                call = calls[buffer.rank]
                there = ~torch.isin(call["topk_idx"], torch.tensor(lost or [-1], device=buffers.device))
                assert torch.equal(outs[buffer.rank], call["x"] * there.sum(dim=1, keepdim=True))


def tokens_over(rank: int, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (settings["max_tokens"], settings["hidden"]), generator=generator)
    ids = torch.rand(len(x), settings["num_experts"], generator=generator).argsort(dim=1)[:, : settings["topk"]]
    return {"x": x.bfloat16().to(device), "topk_idx": ids.to(device), "layout": "expert"}


@pytest.mark.gpu2
@pytest.mark.parametrize("call", CALLS)
def test_the_others_go_on_after_a_kill(gpu_ranks: Ranks, call: str, tmp_path: Path) -> None:
    times = kill_one(gpu_ranks, gpu_count(), call, 0, tmp_path)
    assert times["noticed_ms"] < 1000
    assert times[f"{call}_ms"] < 1000


def _replays(rank: int, group: Any, tokens: int) -> tuple[int, ...]:
    buffer = moecomm.Buffer(group, **{**OF_KILLS, "max_tokens": tokens}, timeout_s=5, on_timeout="mask")
    given = tokens_of(rank, buffer.device, tokens)
    for _ in range(2):
        routed = buffer.dispatch(**given)
        buffer.combine(routed.x, routed.handle, wire="exact")
    buffer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = buffer.dispatch(**given)
        out = buffer.combine(routed.x, routed.handle, wire="exact")

    def replay(want: torch.Tensor) -> None:
        graph.replay()
        buffer.check()
        assert torch.equal(out, want)

    for _ in range(20):
        replay(sums_of(given))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(moecomm.PeerLost, match="the next call works"):
        replay(sums_of(given))
    for _ in range(100):
        replay(sums_of(given, experts_of(1, OF_KILLS["num_experts"], group.size())))
    return buffer.masked


@pytest.mark.gpu2
@pytest.mark.parametrize("tokens", [64, 3000])  # in packets, and through rings
def test_captured_graphs_follow_a_mask(gpu_ranks: Ranks, tokens: int) -> None:
    count = gpu_count()
    gpu_ranks.start(count, _replays, tokens)
    left = set(range(count)) - {1}
    assert gpu_ranks.results(count - 1, timeout_s=100) == dict.fromkeys(left, (1,))


def _replayed_layers(rank: int, group: Any, fp8: bool) -> tuple[int, ...]:
    buffer = moecomm.Buffer(group, **OF_KILLS, timeout_s=5, on_timeout="mask")
    local, hidden, inner = OF_KILLS["num_experts"] // group.size(), OF_KILLS["hidden"], 128
    generator = torch.Generator(buffer.device).manual_seed(rank)
    random = partial(torch.randn, generator=generator, device=buffer.device)
    w13, w2 = (random(local, *shape).bfloat16() / 8 for shape in ((2 * inner, hidden), (hidden, inner)))
    weights = (quantize_weights(w13), quantize_weights(w2)) if fp8 else (w13, w2)
    given = tokens_of(rank, buffer.device)
    layer = partial(buffer.moe, given["x"], given["topk_idx"], given["topk_weights"], *weights)

    def unfused() -> torch.Tensor:
        out: torch.Tensor = layer(fused=False)
        buffer.check()
        return out

    before = unfused()
    assert torch.equal(layer(fused=True), before)
    buffer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(fused=True)

    def replay() -> torch.Tensor:
        graph.replay()
        buffer.check()
        return out

    for _ in range(20):
        assert torch.equal(replay(), before)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(moecomm.PeerLost, match="the next call works"):
        replay()
    after = unfused()
    assert not torch.equal(after, before)
    for _ in range(100):
        assert torch.equal(replay(), after)
    return buffer.masked


@pytest.mark.gpu2
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_captured_fused_layers_follow_a_mask(gpu_ranks: Ranks, fp8: bool) -> None:
    count = gpu_count()
    gpu_ranks.start(count, _replayed_layers, fp8)
    left = set(range(count)) - {1}
    assert gpu_ranks.results(count - 1, timeout_s=150) == dict.fromkeys(left, (1,))
