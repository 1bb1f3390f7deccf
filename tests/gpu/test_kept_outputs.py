"""Outputs that callers keep on GPUs, beside captured graphs: virtual ranks that share one.  See tests/keeper.py."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends.lsa import LsaSession
from moecomm.base import packets
from moecomm.compat.deep_ep import Buffer
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine

from ..backends.conftest import all_ranks
from ..conftest import Ranks
from ..keeper import Keeper, draw, window_for
from ..little_room import fixed_windows

pytestmark = [pytest.mark.gpu1, pytest.mark.filterwarnings("ignore:a window of:UserWarning")]
LAYOUTS = ("flat", "expert", "batched")
SIZES: dict[str, Any] = {
    "ranks": 2,
    "hidden": 512,
    "num_experts": 8,
    "topk": 2,
    "max_tokens": 64,
    "dtype": torch.bfloat16,
}
BUFFER: dict[str, Any] = {**SIZES, "backend": "lsa", "device": 0, "timeout_s": 20}


@pytest.fixture
def fixed() -> Iterator[None]:
    """See fixed_windows()."""
    with fixed_windows(LsaSession):
        yield


@pytest.mark.timeout(900)
@pytest.mark.parametrize("few_tokens", [True, False], ids=["packets", "rows"])
@pytest.mark.parametrize("verify_every", [0, 2])
@pytest.mark.parametrize("window", ["grows", "fixed"])
def test_random_cases_of_which_each_rank_keeps_others(
    few_tokens: bool, verify_every: int, window: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if window == "fixed":
        request.getfixturevalue("fixed")
    if not few_tokens:
        monkeypatch.setattr(packets, "room", lambda *_: 0)
    seed = request.config.getoption("--seed")
    nbytes = window_for(1.5 if verify_every else 1.2, SIZES)
    with LocalBuffers(**BUFFER, window_bytes=nbytes, verify_every=verify_every) as ranks:
        keeper = Keeper(ranks, seed, 14)
        keeper.run(range(1000 * seed, 1000 * seed + 80), **SIZES, few_kernels=True)
        ranks.check()
    assert keeper.outside > 10 if window == "fixed" else keeper.outside < keeper.inside


def call(seed: int, **more: Any) -> dict[str, Any]:
    given = draw(SIZES["max_tokens"], SIZES["hidden"], SIZES["num_experts"], SIZES["topk"], seed)
    return {name: tensor.cuda() for name, tensor in given.items()} | more


def wanted(given: dict[str, Any]) -> torch.Tensor:
    """Return the result of a layer that doubles rows, but for rounding."""
    return (given["x"].float() * 2 * given["topk_weights"].sum(dim=1, keepdim=True)).bfloat16()


def one_layer(buffer: moecomm.Buffer, given: dict[str, Any]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A round of a rank; what it may keep: outputs, the rows of experts, the result."""
    routed = buffer.dispatch(**given, sync=False)
    y = routed.x * 2
    if given["layout"] == "flat":
        y = (y.float() * routed.topk_weights.sum(dim=1, keepdim=True)).bfloat16()
    return routed, y, buffer.combine(y, routed.handle, wire="exact")


@dataclass
class Graph:
    """A captured layer of all ranks; its inputs, and its outputs, which stay alive."""

    graphs: list[torch.cuda.CUDAGraph]
    given: list[dict[str, Any]]
    found: list[tuple[Any, torch.Tensor, torch.Tensor]]

    def replay(self, ranks: LocalBuffers, seed: int) -> None:
        """Run with new inputs and check the result and the rows."""
        for rank, mine in enumerate(self.given):
            for name, tensor in call(seed + rank).items():
                mine[name].copy_(tensor)
        torch.cuda.synchronize()
        for graph, stream in zip(self.graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        ranks.check()
        self.check()

    def check(self) -> None:
        for mine, (routed, _, out) in zip(self.given, self.found, strict=True):
            torch.testing.assert_close(out, wanted(mine), rtol=2**-6, atol=2**-6)
            assert rows_of(routed).isfinite().all()


def rows_of(routed: Any) -> torch.Tensor:
    """The rows in use."""
    x = routed.x
    if x.ndim == 3:
        return x[torch.arange(x.shape[1], device=x.device) < routed.tokens_per_expert[:, None]]
    return x[: int(routed.num_rows)][routed.src[: int(routed.num_rows), 0] >= 0]


def captured(ranks: LocalBuffers, layout: str, seed: int) -> Graph:
    given = [call(seed + rank, layout=layout) for rank in range(SIZES["ranks"])]
    eager(ranks, given)  # compiles
    made = Graph([], given, [])
    for buffer, mine, stream in zip(ranks.buffers, given, ranks.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made.found.append(one_layer(buffer, mine))
        made.graphs.append(graph)
    return made


def eager(ranks: LocalBuffers, given: list[dict[str, Any]]) -> list[Any]:
    routed = ranks.dispatch([{**mine, "sync": False} for mine in given])
    calls = []
    for here in routed:
        y = here.x * 2
        if here.handle.layout == "flat":
            y = (y.float() * here.topk_weights.sum(dim=1, keepdim=True)).bfloat16()
        calls.append({"y": y, "handle": here.handle, "wire": "exact"})
    outs = ranks.combine(calls)
    ranks.check()
    for mine, out in zip(given, outs, strict=True):
        torch.testing.assert_close(out, wanted(mine), rtol=2**-6, atol=2**-6)
    return routed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", ["default", "of a round", "fixed"])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_keeper_of_outputs_and_graphs(
    seed: int, window: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Captures, replays and eager rounds in any order, while outputs of both stay alive."""
    if window == "fixed":
        request.getfixturevalue("fixed")
    if seed % 2:
        monkeypatch.setattr(packets, "room", lambda *_: 0)  # rows that are reduced have a place each
    rng = random.Random(seed)
    more = {} if window == "default" else {"window_bytes": window_for(1.2, SIZES)}
    with LocalBuffers(**BUFFER, **more) as ranks:
        graphs: list[Graph] = []
        kept: list[tuple[Any, torch.Tensor]] = []
        for step in range(60):
            what = rng.choice(["capture", "replay", "replay", "eager", "eager", "eager", "drop"])
            if what == "capture" and len(graphs) < 6:
                graphs.append(captured(ranks, rng.choice(LAYOUTS), 1000 * step))
            elif what == "replay" and graphs:
                rng.choice(graphs).replay(ranks, 1000 * step)
            elif what == "eager":
                given = [call(1000 * step + rank, layout=rng.choice(LAYOUTS)) for rank in range(2)]
                given[1]["layout"] = given[0]["layout"]
                kept += [(routed, rows_of(routed).clone()) for routed in eager(ranks, given)]
            elif kept:
                kept = rng.sample(kept, rng.randrange(len(kept)))
            for routed, rows in kept:
                assert torch.equal(rows_of(routed), rows), step
            if len(kept) > 16:
                kept = kept[8:]
        assert graphs
        assert window != "of a round" or all(buffer.rounds.memory.parts.extensions for buffer in ranks.buffers)
        for graph in graphs:
            graph.replay(ranks, 7)


def test_an_eager_combine_beside_graphs_has_a_place_for_each_reduced_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "room", lambda *_: 0)
    with LocalBuffers(**BUFFER) as ranks:
        graphs = [captured(ranks, layout, 100 * at) for at, layout in enumerate(("expert", "batched", "expert"))]
        given = [call(rank, layout="expert") for rank in range(2)]
        routed = eager(ranks, given)
        for buffer, here in zip(ranks.buffers, routed, strict=True):
            assert prepare_combine(buffer, here.x.clone(), here.handle).args.reduced_rows != 0
        for graph in graphs:
            graph.replay(ranks, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_stay_in_the_window_when_it_has_grown(layout: str) -> None:
    """Ranks map each other's memory one call later; from then on nothing is copied, also beside a graph."""
    with LocalBuffers(**BUFFER, window_bytes=window_for(1.2, SIZES)) as ranks:
        in_heap, given = ranks.buffers[0].rounds.session.context.in_heap, [call(rank, layout=layout) for rank in (0, 1)]
        graph = captured(ranks, layout, 50)
        outside = []
        for step in range(8):
            kept = [eager(ranks, given) for _ in range(12)]
            outside.append(sum(not in_heap(routed[0].x.data_ptr()) for routed in kept))
            rows = [[rows_of(here).clone() for here in routed] for routed in kept]
            graph.replay(ranks, 1000 + step)
            for routed, wanted_rows in zip(kept, rows, strict=True):
                for here, wanted_here in zip(routed, wanted_rows, strict=True):
                    assert torch.equal(rows_of(here), wanted_here)
            del kept, routed, here
        assert outside[-2:] == [0, 0], outside


def test_a_rank_alone_copies_nothing() -> None:
    """Nobody has to map its memory, so that even graphs have room for their outputs."""
    sizes = {name: size for name, size in BUFFER.items() if name != "ranks"}
    with moecomm.Buffer("self", **sizes, window_bytes=window_for(1.2, {**SIZES, "ranks": 1})) as buffer:
        given, in_heap = call(3, layout="expert"), buffer.rounds.session.context.in_heap
        found = [one_layer(buffer, given)]
        for step in range(4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found.append(one_layer(buffer, given))
            found += [one_layer(buffer, given) for _ in range(5)]
            graph.replay()
            buffer.check()
            assert step < 3 or torch.equal(found[-1][2], found[-6][2])
        assert all(in_heap(routed.x.data_ptr()) for routed, _, _ in found)
        free, held = torch.cuda.mem_get_info(0)[0], buffer.nbytes
        found.clear()
        del graph
        buffer.release_memory()
        assert buffer.nbytes < held and torch.cuda.mem_get_info(0)[0] > free
        buffer.restore()
        assert buffer.nbytes == held
        one_layer(buffer, given)
        buffer.check()


def _keeps(rank: int, group: Any) -> list[int]:
    os.environ["MOECOMM_WINDOW"] = "vmm"
    sizes = {name: size for name, size in SIZES.items() if name != "ranks"}
    with moecomm.Buffer(group, **sizes, backend="lsa", timeout_s=60, window_bytes=window_for(1.2, SIZES)) as buffer:
        in_heap, outside = buffer.rounds.session.context.in_heap, []
        for step in range(8):
            kept = []
            for at in range(12):
                given = call(100 * at + rank, layout=LAYOUTS[at % 3])
                routed, _, out = one_layer(buffer, given)
                torch.testing.assert_close(out, wanted(given), rtol=2**-6, atol=2**-6)
                kept.append((routed, rows_of(routed).clone()))
            outside.append(sum(not in_heap(routed.x.data_ptr()) for routed, _ in kept))
            buffer.check()
            assert all(torch.equal(rows_of(routed), rows) for routed, rows in kept)
            kept.clear()
            del routed
            if step == 5:
                buffer.release_memory()
                buffer.restore()
        return outside


@pytest.mark.timeout(600)
def test_processes_map_what_their_peers_take(gpu_ranks: Ranks) -> None:
    for outside in gpu_ranks.run(2, _keeps):
        assert outside[-2:] == [0, 0], outside


def test_fused_layers_beside_kept_outputs() -> None:
    """A layer takes its memory from the reserve, and leaves nothing there."""
    with moecomm.Buffer("self", **{name: size for name, size in BUFFER.items() if name != "ranks"}) as buffer:
        given = call(1)
        g = torch.Generator().manual_seed(2)
        w13 = (torch.randn(8, 1024, 512, generator=g) / 20).bfloat16().cuda()
        w2 = (torch.randn(8, 512, 512, generator=g) / 20).bfloat16().cuda()

        def layer() -> torch.Tensor:
            found: torch.Tensor = buffer.moe(given["x"], given["topk_idx"], given["topk_weights"], w13, w2)
            return found

        want = layer()
        kept = [(routed, rows_of(routed).clone()) for routed in (buffer.dispatch(**given) for _ in range(6))]
        assert torch.equal(layer(), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer()
        graph.replay()
        buffer.check()
        assert torch.equal(out, want)
        assert all(torch.equal(rows_of(routed), rows) for routed, rows in kept)


def test_low_latency_results_of_deep_ep() -> None:
    """Hooks, FP8 and zero-copy buffers, all of them alive."""

    def body(group: Any) -> None:
        buffer, experts, tokens = Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=4), 8, 32
        given = draw(tokens, 512, experts, 2, group.rank)
        x, ids, weights = (given[name].cuda() for name in ("x", "topk_idx", "topk_weights"))
        kept = []
        for step in range(12):
            recv, count, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, tokens, experts, use_fp8=step % 3 == 0, return_recv_hook=step % 2 == 0
            )
            if hook is not None:
                hook()
            y = torch.ones(handle.native.y_shape, dtype=torch.bfloat16, device="cuda")
            if step % 4 == 1:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
            out, _, _ = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=step % 4 == 1)
            torch.testing.assert_close(out.float(), weights.sum(dim=1, keepdim=True).expand(-1, 512), rtol=1e-2, atol=0)
            rows = recv[0].view(torch.uint8) if isinstance(recv, tuple) else recv
            used = torch.arange(rows.shape[1], device="cuda") < count[:, None]
            kept.append((rows, used, rows[used].clone(), handle))
        assert all(torch.equal(rows[used], want) for rows, used, want, _ in kept)

    all_ranks(1, body)
