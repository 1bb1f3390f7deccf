"""Experts that move between GPUs while layers go on, and placements that change between rounds in flight."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base.placement import replicated
from moecomm.testing.cases import random_placement

from ..conftest import Ranks, gpu_count
from ..copied_gradients import CopiedGradients

pytestmark = pytest.mark.gpu2
HIDDEN, INNER, EXPERTS, SLOTS, TOKENS, TOPK = 512, 256, 16, 12, 64, 4


def _moves(rank: int, group: Any, fused: bool) -> int:
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g).bfloat16().cuda() / 16
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=g).bfloat16().cuda() / 16
    mine = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=mine).bfloat16().cuda()
    ids = torch.rand(TOKENS, EXPERTS, generator=mine).argsort(dim=1)[:, :TOPK].contiguous().cuda()
    routing = torch.rand(TOKENS, TOPK, generator=mine).cuda()
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    drawn = {"ranks": group.size(), "num_experts": EXPERTS, "slots": SLOTS}
    commits, outs = 0, list[torch.Tensor]()  # no host waits for a layer before all are enqueued
    with moecomm.Buffer(group, **sizes, timeout_s=20, placement=random_placement(0, **drawn)) as buffer:
        weights = moecomm.ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)})
        held = torch.tensor(list(buffer.local_experts))
        for name, whole in (("w13", w13), ("w2", w2)):
            weights[name][held >= 0] = whole[held[held >= 0].cuda()]
        given = (x, ids, routing, weights["w13"], weights["w2"])
        want = buffer.moe(*given, fused=fused).float()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = buffer.moe(*given, fused=fused)
        for seed in range(1, 5):
            target, rate = random_placement(seed, **drawn), {"max_gbs": 20.0} if seed % 2 else {}
            while weights.prefetch(target, **rate) != buffer.placement:
                for replay in range(4):
                    if replay == 3:
                        weights.commit()
                        commits += 1
                    out.zero_()
                    graph.replay()
                    outs.append(out.float())
        for found in outs:
            torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6)
        buffer.check()
        del out, graph
        weights.close()
    return commits


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [True, False])
def test_layers_go_on_while_experts_move(gpu_ranks: Ranks, fused: bool) -> None:
    count = gpu_count()
    commits = gpu_ranks.run(count, _moves, fused)
    assert len(set(commits)) == 1 and commits[0] >= 4


def _replicates(rank: int, group: Any, fused: bool) -> int:
    """Make layers whose experts are copied, behind each of which every rank changes its weights at once."""
    ranks, g = group.size(), torch.Generator().manual_seed(0)
    placement = moecomm.Placement(
        [range(first, EXPERTS, ranks) for first in range(ranks)], slots=SLOTS, choice="balanced"
    )
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g).bfloat16() / 16
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=g).bfloat16() / 16
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 + rank)).bfloat16().cuda()
    loads = [torch.rand(EXPERTS, generator=g) ** 8 + 1e-6 for _ in range(4)]
    every = [[torch.multinomial(load.expand(TOKENS, -1), TOPK, generator=g) for _ in range(ranks)] for load in loads]
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    sizes |= {"timeout_s": 20, "capacity_factor": float(ranks)}
    with moecomm.Buffer(group, **sizes, placement=placement) as buffer:
        weights = moecomm.ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)})
        held = torch.tensor(list(buffer.local_experts))
        for name, whole in (("w13", w13), ("w2", w2)):
            weights[name].fill_(torch.nan)[(held >= 0).cuda()] = whole[held[held >= 0]].cuda()
        given = [(x, ids[rank].cuda(), None, weights["w13"], weights["w2"]) for ids in every]
        wants = [buffer.moe(*some).float() for some in given]
        outs = []
        for nth in range(60):
            outs.append(buffer.moe(*given[nth % 4], fused=fused, balance="replicate").float() * (-1) ** nth)
            weights["w2"].mul_(-1)
        buffer.check()
        for nth, out in enumerate(outs):
            torch.testing.assert_close(out, wants[nth % 4], rtol=2**-6, atol=2**-6)
        weights.close()
    counts = [torch.stack([torch.bincount(one.flatten(), minlength=EXPERTS) for one in ids]) for ids in every]
    return sum(int((replicated(placement, one).experts != placement.experts).sum()) for one in counts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [True, False])
def test_weights_change_as_soon_as_a_layer_with_copies_has_ended(gpu_ranks: Ranks, fused: bool) -> None:
    made = gpu_ranks.run(gpu_count(), _replicates, fused)
    assert len(set(made)) == 1 and made[0] > 0


def _copied(ranks: int, biased: bool) -> CopiedGradients:
    """Experts of the first ranks are in most tokens; each rank has empty slots."""
    g = torch.Generator().manual_seed(ranks)
    placement = moecomm.Placement(
        [range(first, EXPERTS, ranks) for first in range(ranks)], slots=SLOTS, choice="balanced"
    )
    load = torch.rand(EXPERTS, generator=g) ** 8 + 1e-6
    ids = [torch.multinomial(load.expand(TOKENS, -1), 2, generator=g) for _ in range(ranks)]
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS, "timeout_s": 20}
    sizes["capacity_factor"] = float(ranks)
    return CopiedGradients(placement, ids, INNER, biased, sizes, torch.bfloat16, "cuda")


def _gradients(rank: int, group: Any, biased: bool) -> Any:
    return _copied(group.size(), biased).run(group)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_copies_are_added_in_the_order_of_slots(gpu_ranks: Ranks, biased: bool) -> None:
    case = _copied(gpu_count(), biased)
    assert bool((case.after.experts != case.placement.experts).any())
    case.check(gpu_ranks.run(gpu_count(), _gradients, biased))


def _captures(rank: int, group: Any) -> None:
    """A capture of a layer whose gradients need the host is refused; one without gradients is not."""
    case = _copied(group.size(), False)
    with moecomm.Buffer(group, **case.sizes, placement=case.placement) as buffer:
        weights = moecomm.ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)})
        for name in ("w13", "w2"):
            weights[name].fill_(0.5)
        given = torch.ones(TOKENS, HIDDEN, device="cuda").bfloat16(), case.ids[rank].cuda(), None
        leaves = [torch.nn.Parameter(weights[name]) for name in ("w13", "w2")]
        plain = [leaf.detach() for leaf in leaves]
        ops.moe(buffer, *given, *plain, balance="replicate")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(moecomm.Unsupported, match="in a capture"):
                ops.moe(buffer, *given, *leaves, balance="replicate")
            out = ops.moe(buffer, *given, *plain, balance="replicate")
        graph.replay()
        buffer.check()
        assert bool(out.isfinite().all())
        weights.close()


@pytest.mark.timeout(300)
def test_a_capture_of_gradients_of_copies_is_refused(gpu_ranks: Ranks) -> None:
    gpu_ranks.run(gpu_count(), _captures)


def _commits(rank: int, group: Any) -> tuple[bool, float]:
    placements = [moecomm.Placement([[expert] for expert in order], slots=2) for order in ([0, 1], [1, 0])]
    numbers = torch.zeros(1, device="cuda")
    with moecomm.Buffer(group, hidden=64, num_experts=2, topk=1, max_tokens=8, placement=placements[0]) as buffer:
        weights = moecomm.ExpertWeights(buffer, {"w": (1 << 24,)}, dtype=torch.float32)
        assert weights.prefetch(placements[1]) != placements[0]
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)
        numbers += 1
        behind = torch.cuda.current_stream().record_event()
        weights.commit()
        goes_on = not behind.query()
        begin = time.perf_counter()
        weights.prefetch(placements[0], max_gbs=1.0)  # 64 MiB
        weights.commit()
        weights.close()
    return goes_on, time.perf_counter() - begin


def test_a_commit_waits_for_copies_alone(gpu_ranks: Ranks) -> None:
    """Not for work on the stream of rounds; and copies take the time that they shall take."""
    for goes_on, took_s in gpu_ranks.run(2, _commits):
        assert goes_on and took_s >= 0.9 * (1 << 26) / 1e9


def _changes(rank: int, group: Any, tokens: int) -> None:
    def ids_of(of: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(of)
        return [torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous() for _ in range(4)]

    x = torch.randn(tokens, HIDDEN).bfloat16().cuda()
    given = [ids.cuda() for ids in ids_of(rank)]
    drawn = {"ranks": group.size(), "num_experts": EXPERTS, "slots": SLOTS}
    placements = [random_placement(seed, **drawn) for seed in range(5)]
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": tokens}
    with moecomm.Buffer(group, **sizes, timeout_s=20, placement=placements[0]) as buffer:
        routed = buffer.dispatch(x, given[0])
        routes = []
        for nth in range(200):
            if nth % 3 != 2:
                buffer.set_placement(placements[nth % 5])
            routed = buffer.dispatch(x, given[nth % 4], sync=False)
            routes.append((nth % 4, buffer.placement, routed.tokens_per_expert.clone()))
            out = buffer.combine(routed.x, routed.handle)
        buffer.check()
        of_ranks = [ids_of(of) for of in range(group.size())]
        for which, placement, counts in routes:
            slots = torch.cat([placement.slots_of(ids[which], of).flatten() for of, ids in enumerate(of_ranks)])
            want = torch.bincount(slots, minlength=placement.ranks * SLOTS).view(-1, SLOTS)[rank]
            assert torch.equal(counts.cpu().long(), want)
        del routed, out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_placements_change_between_rounds_in_flight(gpu_ranks: Ranks, tokens: int) -> None:
    """Kernels of few tokens begin while those before them end; no host waits between rounds and changes."""
    gpu_ranks.run(gpu_count(), _changes, tokens)
