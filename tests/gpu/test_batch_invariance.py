"""The bits of a token on a GPU, alone and among others, and of layers whose rows travel unsummed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import lsa
from moecomm.testing import LocalBuffers

from ..test_batch_invariance import (
    EXPERTS,
    HIDDEN,
    SIZES,
    WIRES,
    batches,
    check_everything,
    check_other_tokens,
    tokens,
)

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(900)]
GPU: dict[str, Any] = {"backend": "lsa", "device": 0, "timeout_s": 20}
INNER = 136


@pytest.mark.parametrize(
    ("layout", "quantize"),
    [("expert", None), ("batched", "fp8"), ("flat", None), ("expert", "mxfp8"), ("flat", "fp8")],
)
def test_other_tokens_change_nothing(layout: str, quantize: str | None) -> None:
    """Few tokens travel in packets, more are pulled."""
    check_other_tokens(layout, quantize, GPU, WIRES if layout == "flat" else (*WIRES, "rows"))


@pytest.mark.parametrize("layout", ["expert", "flat"])
def test_other_tokens_change_nothing_across_domains(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsa, "direct_bytes", lambda *_: 32 << 10)
    check_other_tokens(layout, None, GPU, WIRES, domain_ranks=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_nothing_changes_a_token_whose_rows_travel_unsummed(layout: str, dtype: torch.dtype) -> None:
    check_everything(layout, dtype, GPU, (1, 2, 4))


def test_verified_rows_travel_unsummed() -> None:
    check_everything("expert", torch.bfloat16, {**GPU, "verify_every": 1}, (1, 4))


def test_a_graph_replays_with_rows_outside_of_the_window() -> None:
    """What is captured copies them there."""
    with moecomm.Buffer("self", **SIZES, device="cuda") as buffer:
        x, ids, weights = (tensor.cuda() for tensor in tokens(24, 0))
        routed = buffer.dispatch(x, ids, weights, sync=True)
        y, out = torch.empty_like(routed.x), torch.empty_like(x)

        def step() -> None:
            buffer.combine(y, routed.handle, wire="rows", out=out)

        y.copy_(routed.x)
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for power in range(3):
            y.copy_(routed.x * 2.0**power)
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, buffer.combine(y.clone(), routed.handle, wire="rows"))
        buffer.check()


def test_operators_have_the_bits_of_a_buffer() -> None:
    """Weights of operators are no tensors of the window: they are brought there."""
    with moecomm.Buffer("self", **SIZES, device="cuda") as buffer:
        x, ids, weights = (tensor.cuda() for tensor in tokens(24, 0))
        routed = buffer.dispatch(x, ids, weights, sync=True)
        wanted = buffer.combine(routed.x, routed.handle, wire="rows")
        sent = moecomm.ops.dispatch(buffer, x, ids, weights)
        assert torch.equal(moecomm.ops.combine(sent.x.clone(), sent.handle, wire="rows"), wanted)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_nothing_changes_a_token_of_a_layer(fused: bool) -> None:
    """Of moecomm's GEMMs, with a row an expert and with a hundred, on 1, 2 and 4 ranks."""
    g = torch.Generator().manual_seed(0)
    w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) / 16).bfloat16().cuda()
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=g) / 12).bfloat16().cuda()
    token, found = tokens(8, 1), []
    for count in (1, 2, 4):
        given = [([token], 0)] if count == 1 else batches(token, count)
        with LocalBuffers(count, **SIZES, **GPU) as ranks:
            for batch, first in given:
                calls = []
                for buffer, (x, ids, weights) in zip(ranks.buffers, batch, strict=True):
                    mine = slice(buffer.local_experts[0], buffer.local_experts[-1] + 1)
                    how: dict[str, Any] = {"x": x.cuda(), "topk_idx": ids.cuda(), "topk_weights": weights.cuda()}
                    calls.append({**how, "w13": w13[mine], "w2": w2[mine], "wire": "rows", "fused": fused})
                outs = ranks.moe(calls)
                ranks.check()
                found.append(outs[min(1, count - 1)][first : first + 8].cpu())
    assert all(torch.equal(out, found[0]) for out in found) and bool(found[0].any())
