"""Decoding with an expert layer in a captured CUDA graph. Without a GPU the same loop runs eagerly, and prints so.

    python examples/decode_in_a_graph.py
    torchrun --nproc-per-node 4 examples/decode_in_a_graph.py

Every step routes each sequence's state anew, sends it through its experts, and feeds the result to the next step. A
graph replays with any routing, because counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from launched import group

import moecomm
from moecomm.nn import Gate
from moecomm.router import Gating

SEQUENCES, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, STEPS = 4, 256, 128, 8, 2, 16


def weights(buffer: moecomm.Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w13 and w2 of this rank's experts."""
    local = EXPERTS // buffer.num_ranks
    generator = torch.Generator().manual_seed(buffer.rank)
    w13 = torch.randn(local, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(local, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return w13.to(buffer.device, buffer.dtype), w2.to(buffer.device, buffer.dtype)


def captured(step: Callable[[], None], buffer: moecomm.Buffer) -> Callable[[], Any]:
    """Return the step as a captured graph; without a GPU, the step itself."""
    if buffer.device.type != "cuda":
        print("no GPU: the loop runs without a graph")
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


@torch.no_grad()
def decode(ranks: Any, graph: bool = True) -> torch.Tensor:
    """Return the states [SEQUENCES, HIDDEN] of this rank after STEPS steps."""
    with moecomm.Buffer(ranks, hidden=HIDDEN, num_experts=EXPERTS, topk=TOPK, max_tokens=SEQUENCES) as buffer:
        gate = Gate(Gating(HIDDEN, EXPERTS, TOPK), device=buffer.device)
        w13, w2 = weights(buffer)
        generator = torch.Generator().manual_seed(100 + buffer.rank)
        first = torch.randn(SEQUENCES, HIDDEN, generator=generator).to(buffer.device, buffer.dtype)
        state = first.clone()

        def step() -> None:
            topk_idx, topk_weights = gate(state)
            out = buffer.moe(state, topk_idx, topk_weights, w13, w2)
            state.copy_(torch.nn.functional.rms_norm(state + out, (HIDDEN,)))

        step()  # compiles kernels, which is not possible during capture
        buffer.check()
        run = captured(step, buffer) if graph else step
        state.copy_(first)
        for _ in range(STEPS):
            run()
        buffer.check()  # raises an error that a replay has found
        return state.cpu()


if __name__ == "__main__":
    with group() as ranks:
        states = decode(ranks)
        print(f"{STEPS} steps of {SEQUENCES} sequences; the first begins with {states[0, :4].tolist()}")
