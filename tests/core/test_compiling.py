"""Answers of torch.compile to a Buffer's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm

from ..few import few

H, E, K, T = 64, 8, 2, 4


def dispatched(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor) -> Any:
    return buffer.dispatch(x, idx, layout="flat").x


def whole(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor) -> Any:
    return buffer.moe(x, idx, None, torch.ones(E, 2 * H, H), torch.ones(E, H, H))


@pytest.mark.parametrize("call", few([dispatched, whole], dispatched))
def test_a_whole_graph_is_refused_with_the_name_of_the_operators(call: Callable[..., Any]) -> None:
    x, idx = torch.rand(T, H), torch.rand(T, E).topk(K).indices
    with moecomm.Buffer("self", hidden=H, num_experts=E, topk=K, max_tokens=T, dtype=torch.float32) as buffer:
        want = call(buffer, x, idx)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use moecomm\.ops"):
            torch.compile(call, backend="eager", fullgraph=True)(buffer, x, idx)
        torch._dynamo.reset()
        broken = torch.compile(call, backend="eager")(buffer, x, idx)  # in several graphs
        assert torch.equal(broken, want)
