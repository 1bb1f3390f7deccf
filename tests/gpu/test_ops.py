"""Operators on a GPU: the bits of the CPU's, in eager mode, in a compiled graph and in a replayed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats, ops
from moecomm.base.protocol import LAYOUTS
from moecomm.nn import ExpertParallel
from moecomm.testing import LayerCase
from tests.ops import plain
from tests.ops.plain import grads_of, seen_by, wanting
from tests.ops.ranks import Case, case

from .layers import copy_into
from .test_moe import full_layer, of_buffer, same_bits

LAYER: dict[str, Any] = {"hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40}
KINDS = [{"fused": False}, {"fused": True}, {"fp8": True}]

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


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of it, after a call that compiles, and what that graph writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


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

        graph, outs = captured(step)
        for seed in range(3):
            with torch.no_grad():
                x.copy_(c.drawn(x.shape, seed).round())
                idx.copy_(idx.flip(0))
            graph.replay()
            got = [t.clone() for t in outs]
            for mine, want in zip(got, step(), strict=True):
                assert torch.equal(mine, want)
        buffer.check()


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_formats_have_the_bits_of_a_cpu_and_replay(layout: Any, name: Any) -> None:
    c = case(1, seed=1, dtype=torch.bfloat16, hidden=160)
    back: Any = name if name in ops.GRAD_WIRES else "mxfp8"

    def cast(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, layout: Any) -> Any:
        scale = 0.01 if name == "fp8_tensor" else None
        routed = ops.dispatch(buffer, x, idx, weights, layout=layout, quantize=name, x_global_scale=scale)
        return ops.combine(routed.x * 2, routed.handle, weighted=False, grad_wire=back)

    with opened(c, "host") as there, opened(c, "lsa") as here:
        x, idx, weights = (t[0].to(here.device) for t in (c.x, c.topk_idx, c.topk_weights))
        seen = c.drawn(x.shape, 7).to(here.device)
        leaf = x.clone().requires_grad_()

        def step() -> tuple[torch.Tensor, ...]:
            out = cast(here, leaf, idx, weights, layout)
            return out, *torch.autograd.grad(out, leaf, seen)

        graph, outs = captured(step)
        with torch.no_grad():
            leaf.copy_(x.flip(0))
        graph.replay()
        flipped = c.x[0].flip(0).requires_grad_()
        want = cast(there, flipped, c.topk_idx[0], c.topk_weights[0], layout)
        wanted = want, *torch.autograd.grad(want, flipped, seen.cpu())
        for got, mine, expected in zip(outs, step(), wanted, strict=True):
            assert torch.equal(got, mine) and torch.equal(mine.cpu(), expected)
        here.check()


def whole_layer(seed: int, fp8: bool = False) -> LayerCase:
    drawn, g = full_layer(seed, LAYER | {"ranks": 1}), torch.Generator().manual_seed(seed)
    drawn.bias, drawn.fp8 = [torch.randn(drawn.x[0].shape, generator=g).bfloat16()], fp8
    return drawn


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_moe_has_the_bits_of_buffer_moe(kind: dict[str, Any]) -> None:
    fp8, how = kind.get("fp8", False), {name: on for name, on in kind.items() if name == "fused"}
    with moecomm.Buffer(None, **of_buffer(LAYER), backend="lsa") as buffer:
        compiled = torch.compile(ops.moe, fullgraph=True, backend="aot_eager")
        for seed in range(6):
            drawn = whole_layer(seed, fp8)
            call = drawn.call(0, buffer.device) | how
            want = buffer.moe(**call)
            drawn.check(0, want)
            for function in (ops.moe, compiled):
                assert same_bits(function(buffer, **call), want)
        graph, out = captured(lambda: ops.moe(buffer, **call))
        for seed in range(6):
            copy_into(call, whole_layer(seed, fp8).call(0, buffer.device))
            graph.replay()
            assert same_bits(out, buffer.moe(**call)), f"layer of seed {seed}"
        buffer.check()
    torch.compiler.reset()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_moe_are_those_of_float64_and_replay(fused: bool) -> None:
    with moecomm.Buffer(None, **of_buffer(LAYER), backend="lsa") as buffer:
        call = wanting(whole_layer(0).call(0, buffer.device) | {"fused": fused})
        seen = seen_by(whole_layer(0))[0].to(buffer.device)
        compiled = torch.compile(ops.moe, fullgraph=True, backend="aot_eager")
        graph, replayed = captured(lambda: grads_of(ops.moe(buffer, **call), call, seen))
        for seed in range(6):
            drawn = whole_layer(seed)
            with torch.no_grad():
                copy_into(call, drawn.call(0, buffer.device))
                seen.copy_(seen_by(drawn)[0])
            graph.replay()
            (want,) = plain.gradients(drawn, seen_by(drawn))
            plain.check(replayed, want, f"layer of seed {seed}")
            for function in (ops.moe, compiled):
                for name, grad in grads_of(function(buffer, **call), call, seen).items():
                    assert torch.equal(grad, replayed[name]), f"{name}, layer of seed {seed}"
        buffer.check()
    torch.compiler.reset()


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
