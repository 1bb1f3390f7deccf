"""Combines of flat rows outside of the window: a rank's rows for its own tokens are read from y, and not staged.  Some
blocks pull, and the others only copy.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.gpu import blocks
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from .machine import Machine
from .test_single_rows import RANKS, SIZES, TOPK, call, combined, memory

HIDDEN, UNTOUCHED = 1032, 0xAB


@pytest.mark.parametrize("pull_blocks", few([1, 2, 48], 1))
@pytest.mark.parametrize(
    ("place", "grads"), few([("heap", False), ("heap", True), ("ring", False), ("ring", True)], ("heap", False))
)
def test_own_rows_are_not_staged(
    place: str, grads: bool, pull_blocks: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_PULL_BLOCKS", pull_blocks)
    monkeypatch.setattr(machine, "_kernels", {})
    calls = [call(rank, HIDDEN, "flat") for rank in range(RANKS)]
    given = [torch.rand(RANKS * len(calls[0]["x"]), TOPK) if grads else None for _ in calls]
    with LocalBuffers(RANKS, hidden=HIDDEN, **SIZES, backend="host") as ranks:
        routed = ranks.dispatch(calls)
        how = [
            {"weight_grads": None if of is None else of[: len(here.x)]} for of, here in zip(given, routed, strict=True)
        ]
        want = ranks.combine([{"y": here.x, "handle": here.handle, **of} for here, of in zip(routed, how, strict=True)])
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    with LocalBuffers(RANKS, hidden=HIDDEN, **SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", place == "heap")
        routed = ranks.dispatch(calls)
        ys = [here.x.clone() for here in routed]
        rows = [{"y": y, "handle": here.handle, **of} for y, here, of in zip(ys, routed, how, strict=True)]
        pitch = 2 * HIDDEN + (16 if grads else 0)

        def fill(pending: list[Any]) -> None:
            for p, y in zip(pending, ys, strict=True):
                assert (p.args.reduced_rows != 0) == (place == "heap")
                if place == "heap":
                    ctypes.memset(p.args.reduced_rows, UNTOUCHED, len(y) * pitch)

        pending, outs = combined(machine, ranks, rows, fill)
        for out, of in zip(outs, want, strict=True):
            assert all(map(torch.equal, *((out, of) if grads else ([out], [of]))))
        for rank, (p, y, here) in enumerate(zip(pending, ys, routed, strict=True)):
            if place == "heap":
                check_reduced_rows(p.args.reduced_rows, pitch, y, here.src[:, 0] == rank, grads)


def check_reduced_rows(address: int, pitch: int, y: torch.Tensor, own: torch.Tensor, grads: bool) -> None:
    """Rows of other ranks' tokens lie there; those of own tokens only with gradients behind them."""
    assert own.any() and not own.all()
    for slot, row in enumerate(y):
        staged = memory(address + slot * pitch, HIDDEN, torch.bfloat16)
        if own[slot] and not grads:
            assert (staged.view(torch.uint8) == UNTOUCHED).all()
        else:
            assert torch.equal(staged, row)
