"""Operators and modules whose rows travel unsummed: combine(wire="rows")."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import nn, ops

from ..few import few

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 64, 32, 6, 3, 12
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOPK).indices
    return torch.randn(TOKENS, HIDDEN, generator=g).bfloat16(), ids, torch.rand(TOKENS, TOPK, generator=g)


@pytest.mark.parametrize("layout", few(["expert", "batched"], "expert"))
def test_operators_have_the_bits_of_a_buffer(layout: str) -> None:
    """And the gradients of other wires, which do not depend on how results return."""
    x, ids, weights = tokens()
    found = {}
    with moecomm.Buffer("self", **SIZES, device="cpu") as buffer:
        routed = buffer.dispatch(x, ids, weights, layout=layout)
        wanted = buffer.combine(routed.x * 2, routed.handle, wire="rows")
        del routed
        for wire in ("rows", "exact"):
            mine, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
            sent = ops.dispatch(buffer, mine, ids, w, layout=layout)
            out = ops.combine(sent.x * 2, sent.handle, wire=wire)
            out.float().square().sum().backward()
            found[wire] = out, mine.grad, w.grad
        with pytest.raises(moecomm.BadInput, match="wire: got row; want None, 'exact', 'rows'"):
            ops.combine(sent.x, sent.handle, wire="row")  # type: ignore[arg-type]
        with pytest.raises(moecomm.BadInput, match="grad_wire"):
            ops.dispatch(buffer, x, ids, weights, grad_wire="rows")  # type: ignore[arg-type]
    assert torch.equal(found["rows"][0], wanted)
    for one, other in zip(found["rows"][1:], found["exact"][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_layers_have_the_bits_of_a_buffer() -> None:
    """moecomm.ops.moe, and the module without gradients; with them, it multiplies by operators of torch."""
    x, ids, weights = tokens()
    g = torch.Generator().manual_seed(1)
    w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) / 8).bfloat16()
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=g) / 8).bfloat16()
    with moecomm.Buffer("self", **SIZES, device="cpu") as buffer:
        wanted = buffer.moe(x, ids, weights, w13, w2, wire="rows")
        assert torch.equal(ops.moe(buffer, x, ids, weights, w13, w2, wire="rows"), wanted)
        layer = nn.ExpertParallel(buffer=buffer, intermediate=INNER, dtype=torch.bfloat16, wire="rows", **SIZES)
        experts: Any = layer.experts
        with torch.no_grad():
            experts.w13.copy_(w13)
            experts.w2.copy_(w2)
            without = layer(x, ids, weights)
        assert torch.equal(without, wanted)
        out = layer(x, ids, weights)
        torch.testing.assert_close(out, wanted, rtol=2**-5, atol=2**-5)
        out.sum().backward()
        assert experts.w2.grad is not None
