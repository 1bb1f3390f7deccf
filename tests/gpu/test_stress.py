"""Rounds of all sizes back to back between GPUs, in graphs and eager, interleaved and on several streams: all exact.

Weights are powers of two and rows are small integers, so that sums are exact in any order: whatever the routing, a
token returns as itself times the sum of its weights.  Rows tell their tokens apart, so one at a wrong place shows.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import moecomm

from ..conftest import GPU_COUNTS, Ranks

ROUNDS = 100_000
SIZES: dict[str, Any] = {"hidden": 256, "num_experts": 32, "topk": 4, "max_tokens": 1500}
TOKENS = (1, 0, 128, 7, 1500, 300, 33)  # of rank 0; the others have them in another order
LAYOUTS = ("flat", "expert", "flat", "expert", "flat", "expert", "batched")


class Round:
    """Inputs of one dispatch, changed in place, and what must return."""

    def __init__(self, tokens: int, layout: str, seed: int) -> None:
        self.layout, self.tokens = layout, tokens
        self.random = torch.Generator(device="cuda").manual_seed(seed)
        self.x = torch.randint(-64, 65, (tokens, SIZES["hidden"]), generator=self.random, device="cuda").bfloat16()
        self.idx = torch.empty(tokens, SIZES["topk"], dtype=torch.int64, device="cuda")
        self.weights = torch.full((tokens, SIZES["topk"]), 0.25, device="cuda")
        self.change()

    def change(self) -> None:
        """Other experts, and other rows; one in eight entries is nobody's."""
        self.idx.random_(-SIZES["num_experts"] // 8, SIZES["num_experts"], generator=self.random).clamp_(min=-1)
        self.x.copy_(self.x.roll(1, 0))

    def wanted(self) -> torch.Tensor:
        return self.x * (self.idx >= 0).sum(dim=1, keepdim=True) * 0.25

    def experts(self, buffer: moecomm.Buffer, routed: moecomm.Routed) -> torch.Tensor:
        if self.layout != "flat":
            return routed.x
        weights = routed.topk_weights.sum(dim=1, keepdim=True)
        return torch.mul(routed.x, weights.bfloat16(), out=buffer.empty(routed.handle))  # read in place


def _there_and_back(buffer: moecomm.Buffer, rounds: list[Round], wrong: torch.Tensor) -> None:
    """All at once in pairs: dispatch A, dispatch B, combine A, combine B."""
    for pair in zip(rounds[::2], rounds[1::2], strict=True):
        routed = [buffer.dispatch(r.x, r.idx, r.weights, layout=r.layout) for r in pair]
        ys = [r.experts(buffer, here) for r, here in zip(pair, routed, strict=True)]
        outs = [buffer.combine(y, here.handle) for y, here in zip(ys, routed, strict=True)]
        for r, out in zip(pair, outs, strict=True):
            wrong += (out != r.wanted()).sum()


def _stress(rank: int, group: Any, kind: str) -> tuple[int, int]:
    os.environ["MOECOMM_WINDOW"] = kind
    tokens = TOKENS[rank % len(TOKENS) :] + TOKENS[: rank % len(TOKENS)]
    with moecomm.Buffer(group, **SIZES, backend="lsa", timeout_s=20, window_bytes=2 << 30) as buffer:
        rounds = [Round(t, layout, 100 * rank + i) for i, (t, layout) in enumerate(zip(tokens, LAYOUTS, strict=True))]
        rounds.append(Round(tokens[0], "flat", 100 * rank + 99))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        _there_and_back(buffer, rounds, wrong)  # compiles
        buffer.check()
        graphs = []
        for first in (rounds, rounds[::-1]):  # two graphs on one Buffer
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                _there_and_back(buffer, first, wrong)
            graphs.append(graph)
        done, streams = 0, [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for turn in range(ROUNDS):
            for each in rounds:
                each.change()
            graphs[turn % 2].replay()
            done += 2 * len(rounds)
            if turn % 40 == 0:  # eager rounds between graphs, on other streams
                stream = streams[turn // 40 % 2]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    _there_and_back(buffer, rounds, wrong)
                torch.cuda.current_stream().wait_stream(stream)
                done += 2 * len(rounds)
                buffer.check()
            if done >= ROUNDS:
                break
        buffer.check()
        return done, int(wrong)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["vmm", "nccl"])
@pytest.mark.parametrize("count", GPU_COUNTS)
def test_many_rounds_of_all_sizes_are_exact(gpu_ranks: Ranks, kind: str, count: int) -> None:
    gpu_ranks.start(count, _stress, kind)
    for done, wrong in gpu_ranks.results(count, timeout_s=280).values():
        assert done >= ROUNDS and wrong == 0
