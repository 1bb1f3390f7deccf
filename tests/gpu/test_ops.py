"""Operators on a GPU: the bits of the CPU's, in eager mode, in a compiled graph and in a replayed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.dispatch import LAYOUTS
from moecomm.nn import ExpertParallel
from tests.ops.ranks import Case, case

pytestmark = pytest.mark.gpu1


def opened(c: Case, backend: str) -> moecomm.Buffer:
    sizes = {name: getattr(c, name) for name in ("hidden", "num_experts", "topk", "max_tokens", "dtype")}
    return moecomm.Buffer(None, **sizes, backend=backend)


def layer(
    buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, layout: str
) -> torch.Tensor:
    """Experts that multiply by 3: exact, so that no library's rounding comes in."""
    routed = ops.dispatch(buffer, x, idx, weights, layout=layout)
    y = routed.x * 3
    if routed.topk_weights is not None:
        y = y * routed.topk_weights.sum(dim=1, keepdim=True).to(y.dtype)
    return ops.combine(y, routed.handle)


def run(call: Any, buffer: moecomm.Buffer, c: Case, layout: str) -> list[torch.Tensor]:
    x, weights = (t[0].to(buffer.device).requires_grad_() for t in (c.x, c.topk_weights))
    out = call(buffer, x, c.topk_idx[0].to(buffer.device), weights, layout)
    grads = torch.autograd.grad(out, (x, weights), c.drawn(out.shape, 7).round().to(buffer.device))
    return [t.detach().cpu() for t in (out, *grads)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_bits_of_a_cpu(layout: str, dtype: torch.dtype) -> None:
    c = case(1, seed=1, dtype=dtype, exact=True)
    with opened(c, "host") as there, opened(c, "lsa") as here:
        want = run(layer, there, c, layout)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (layer, compiled):
            for got, expected in zip(run(call, here, c, layout), want, strict=True):
                assert torch.equal(got, expected)
        here.check()
    torch.compiler.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_holds_both_passes_and_replays(layout: str) -> None:
    c = case(1, seed=1, exact=True)
    with opened(c, "lsa") as buffer:
        x, weights = (t[0].to(buffer.device).requires_grad_() for t in (c.x, c.topk_weights))
        idx = c.topk_idx[0].to(buffer.device)

        def step() -> tuple[torch.Tensor, ...]:
            out = layer(buffer, x, idx, weights, layout)
            return out, *torch.autograd.grad(out.square().sum(), (x, weights))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(3):
            with torch.no_grad():
                x.copy_(c.drawn(x.shape, seed).round())
                idx.copy_(idx.flip(0))
            graph.replay()
            got = [t.clone() for t in captured]
            for mine, want in zip(got, step(), strict=True):
                assert torch.equal(mine, want)
        buffer.check()


def test_the_layer_trains_in_bfloat16() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 32, "num_experts": 8, "topk": 2, "max_tokens": 40}
    here = ExpertParallel(None, **sizes, dtype=torch.bfloat16, device="cuda")
    there = ExpertParallel(None, **sizes, dtype=torch.bfloat16, device="cpu", backend="host")
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    results = []
    for model, device in ((here, "cuda"), (there, "cpu")):
        mine = x.to(device).requires_grad_()
        out = model(mine)
        out.float().square().sum().backward()
        results.append([t.detach().float().cpu() for t in (out, mine.grad, model.experts.w13.grad)])
    for got, want in zip(*results, strict=True):
        # Some roundings to bfloat16 on the way, of 2^-9 each of what is as large as the largest value.
        assert (got - want).abs().max() <= 16 * 2**-9 * want.abs().max()
