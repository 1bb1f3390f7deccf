"""Rows that have no room in the window of a GPU: rounds in chunks, drops in graphs, and errors where nothing waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.routed import ChunkedHandle

from ..conftest import Ranks

EXPERTS, TOPK, TOKENS = 12, 3, 200
SIZES: dict[str, Any] = {"hidden": 512, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "timeout_s": 20}


def call(rank: int) -> dict[str, Any]:
    """Make tokens that all want the first expert, and others."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS - 1, generator=g).argsort(dim=1)[:, :TOPK] + 1
    ids[:, 0] = 0
    return {
        "x": torch.randn(TOKENS, 512, generator=g).bfloat16().cuda(),
        "topk_idx": ids.cuda(),
        "topk_weights": torch.rand(TOKENS, TOPK, generator=g).cuda(),
    }


def rounds(group: Any, rank: int, factor: float, layout: str, options: dict[str, Any]) -> tuple[bool, list[Any]]:
    """Run a dispatch that waits, a repeat, combines, and operators with gradients; return what they give."""
    given = call(rank)
    with moecomm.Buffer(group, **SIZES, backend="lsa", capacity_factor=factor) as buffer:
        routed = buffer.dispatch(**given, layout=layout, sync=True, **options)  # type: ignore[call-overload]
        y = (routed.x.float() * 2).bfloat16()
        found = [buffer.combine(y, routed.handle), buffer.combine(y, routed.handle, wire="exact")]
        again = buffer.dispatch(given["x"] * 2, handle=routed.handle, **options)
        found.append(buffer.combine((again.x.float() * 2).bfloat16(), routed.handle))
        x = given["x"].clone().requires_grad_()
        sent = ops.dispatch(buffer, x, given["topk_idx"], given["topk_weights"], layout=layout, overflow="chunks")  # type: ignore[arg-type]
        out = ops.combine(sent.x * 3, sent.handle)
        out.float().square().sum().backward()
        buffer.check()
        found += [out.detach(), x.grad, routed.tokens_per_expert.clone(), routed.num_rows.clone()]
        return isinstance(routed.handle, ChunkedHandle), [tensor.cpu() for tensor in found if tensor is not None]


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize(("layout", "factor"), [("expert", 0.5), ("flat", 0.2), ("batched", 0.8)])
def test_chunks_of_one_rank(layout: str, factor: float, quantize: Any) -> None:
    options = {"quantize": quantize}
    at_once, want = rounds("self", 0, math.inf, layout, options)
    chunked, got = rounds("self", 0, factor, layout, options)
    assert (at_once, chunked) == (False, True)
    for first, second in zip(want, got, strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_graphs_drop_and_late_errors_are_told() -> None:
    given = call(0)
    with moecomm.Buffer("self", **SIZES, backend="lsa", capacity_factor=0.5) as buffer:

        def round_() -> tuple[torch.Tensor, torch.Tensor]:
            routed = buffer.dispatch(**given, overflow="drop")
            assert routed.dropped is not None
            return buffer.combine(routed.x, routed.handle), routed.dropped

        want, dropped = round_()
        buffer.check()
        assert int(dropped) == TOKENS * TOPK // 2
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, of_graph = round_()
        for turn in (1, -1):
            given["x"].mul_(turn)
            graph.replay()
            buffer.check()
            assert torch.equal(out, want * turn) and int(of_graph) == int(dropped)
        buffer.dispatch(**given)
        with pytest.raises(moecomm.TooManyRows):
            buffer.check()
        buffer.dispatch(**given)  # leaves an error that the next call, which waits, is not to take for its own
        torch.cuda.synchronize()
        with pytest.raises(moecomm.TooManyRows):
            buffer.dispatch(**given, sync=True)


def _all_to_one(rank: int, group: Any) -> str:
    torch.cuda.set_device(rank)
    for layout, factor in (("expert", 1.0), ("flat", 0.7), ("batched", 1.0)):
        at_once, want = rounds(group, rank, math.inf, layout, {})
        chunked, got = rounds(group, rank, factor, layout, {})
        assert (at_once, chunked) == (False, True), layout
        assert all(torch.equal(first, second) for first, second in zip(want, got, strict=True)), layout
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(300)
def test_chunks_of_several_ranks(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    assert gpu_ranks.run(count, _all_to_one) == ["done"] * count
