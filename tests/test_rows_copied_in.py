"""Flat rows that peers pull: those outside of the window are copied into it, whatever they are, and nothing is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import packets
from moecomm.testing import LocalBuffers

RANKS, TOKENS, HIDDEN = 2, 40, 64
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": 4, "topk": 2, "max_tokens": TOKENS, "dtype": torch.float32}


def rounds(ranks: LocalBuffers, monkeypatch: pytest.MonkeyPatch) -> list[moecomm.Routed]:
    """A flat dispatch of all tokens to one expert of each rank, on ranks that pull as those of GPUs do."""
    for buffer in ranks.buffers:
        monkeypatch.setattr(buffer.session, "pulls_flat_rows", True)
    monkeypatch.setattr(packets, "carry_home", lambda *_: False)
    ids = torch.tensor([[0, 2]]).expand(TOKENS, 2).contiguous()
    return ranks.dispatch([{"x": torch.randn(TOKENS, HIDDEN), "topk_idx": ids, "layout": "flat"} for _ in range(RANKS)])


@pytest.mark.parametrize("how", ["contiguous", "columns of more", "in the window", "no room"])
def test_they_come_home_as_they_are(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with LocalBuffers(RANKS, **SIZES, backend="host") as ranks:
        routed = rounds(ranks, monkeypatch)
        free = [buffer.memory.used for buffer in ranks.buffers]
        copied: list[int] = []
        for buffer in ranks.buffers:
            copy_in = buffer.session.copy_in
            monkeypatch.setattr(
                buffer.session, "copy_in", lambda *given, copy=copy_in: copied.append(given[2]) or copy(*given)
            )
            if how == "no room":
                monkeypatch.setattr(buffer.memory, "allocate", refuse)
        for turn in range(3):  # the first makes a plan, the others find it
            ys = [torch.randn(RANKS * TOKENS, 2 * HIDDEN)[:, ::2] for _ in routed]
            if how != "columns of more":
                ys = [y.contiguous() for y in ys]
            if how == "in the window":
                ys = [b.empty(r.handle).copy_(y) for b, r, y in zip(ranks.buffers, routed, ys, strict=True)]
            outs = ranks.combine([{"y": y, "handle": r.handle} for y, r in zip(ys, routed, strict=True)])
            for rank, out in enumerate(outs):
                mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
                assert torch.equal(out, ys[0][mine] + ys[1][mine]), turn
            del ys
        assert copied == ([] if how in ("in the window", "no room") else [RANKS * TOKENS * HIDDEN * 4] * 6)
        assert [buffer.memory.used for buffer in ranks.buffers] == free


def refuse(*_: int) -> None:
    raise moecomm.BadInput("window_bytes", "none", "some")
