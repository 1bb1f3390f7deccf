"""Experts that move between GPUs while layers go on, and a graph that was captured before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing.cases import random_placement

from ..conftest import Ranks

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
    commits = 0
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
            target = random_placement(seed, **drawn)
            while weights.prefetch(target) != buffer.placement:
                for _ in range(3):
                    graph.replay()
                torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=2**-6)
                weights.commit()
                graph.replay()
                torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=2**-6)
                commits += 1
        buffer.check()
        del out, graph
        weights.close()
    return commits


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [True, False])
def test_layers_go_on_while_experts_move(gpu_ranks: Ranks, fused: bool) -> None:
    count = min(4, torch.cuda.device_count())
    commits = gpu_ranks.run(count, _moves, fused)
    assert len(set(commits)) == 1 and commits[0] >= 4
