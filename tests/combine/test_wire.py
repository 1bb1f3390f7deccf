"""The wire of combine: the dtype of each rank's sum of a token, by default, by call, and as a setting of the Buffer."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import moecomm
from moecomm.errors import BadInput
from moecomm.testing import LocalBuffers

RANKS, HIDDEN, TOPK, TOKENS = 2, 64, 3, 5
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": 4, "topk": TOPK, "max_tokens": 8}
IDS = [[0, 2, 3], [1, 0, -1], [3, -1, -1], [2, 0, 1], [-1, -1, -1]]  # experts 0 and 1 are rank 0's


def combined(buffers: LocalBuffers, *, in_window: bool, layout: str = "expert", **options: Any) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    calls = [
        {
            "x": torch.randn(TOKENS, HIDDEN, generator=g).bfloat16(),
            "topk_idx": torch.tensor(IDS),
            "topk_weights": torch.rand(TOKENS, TOPK, generator=g),
            "layout": layout,
        }
        for _ in range(RANKS)
    ]
    arrived = buffers.dispatch(calls)
    ys = [routed.x if in_window else routed.x.clone() for routed in arrived]
    outs: list[torch.Tensor] = buffers.combine(
        [{"y": y, "handle": routed.handle, **options} for y, routed in zip(ys, arrived, strict=True)]
    )
    return outs


@pytest.mark.parametrize("in_window", [False, True])
def test_the_setting_of_the_buffer_is_the_default_of_its_calls(in_window: bool) -> None:
    with LocalBuffers(RANKS, **SIZES) as rounding, LocalBuffers(RANKS, **SIZES, wire="exact") as exact:
        rounded = combined(rounding, in_window=in_window)
        sums = combined(exact, in_window=in_window)
        assert all(map(torch.equal, rounded, combined(exact, in_window=in_window, wire=torch.bfloat16)))
        for same in ("exact", torch.float32):
            assert all(map(torch.equal, sums, combined(rounding, in_window=in_window, wire=same)))
    assert not all(map(torch.equal, rounded, sums)), "this case rounds"


def test_another_wire_of_a_buffer_is_bad_input() -> None:
    with pytest.raises(BadInput, match="wire"):
        moecomm.Buffer("self", **SIZES, backend="host", wire=torch.bfloat16)


def test_the_only_row_of_a_token_at_a_rank_travels_as_it_is() -> None:
    with LocalBuffers(RANKS, **SIZES) as buffers:
        combined(buffers, in_window=False, wire="exact")
        context = buffers.buffers[1].rounds.session.context
        staged = context.peers[1] + context.window.staging  # of token 0 of rank 0, whose experts here are 2 and 3
        pitch = context.shape.staged_row_bytes
        two, one = (ctypes.string_at(staged + token * pitch, HIDDEN * 4) for token in (0, 2))
        floats = torch.frombuffer(bytearray(two), dtype=torch.float32)
        assert floats.isfinite().all() and floats.abs().max() < 100, "two rows travel as their float32 sum"
        g = torch.Generator().manual_seed(1)
        x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
        weights = torch.rand(TOKENS, TOPK, generator=g)
        assert one[: HIDDEN * 2] == x[2].view(torch.uint8).numpy().tobytes()
        assert torch.frombuffer(bytearray(one[HIDDEN * 2 : HIDDEN * 2 + 4]), dtype=torch.float32)[0] == weights[2, 0]
