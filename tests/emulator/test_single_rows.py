"""Combines with an exact wire: what lies where source ranks pull it, and the bits of the host executor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import combine
from moecomm.backends import host
from moecomm.base import packets
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_combine

from ..few import few
from .machine import Call, Machine

RANKS, EXPERTS, TOPK, TOKENS = 3, 6, 3, 20
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": torch.bfloat16}


def call(rank: int, hidden: int, layout: str) -> dict[str, Any]:
    """Make tokens with one, two or three experts of a rank."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    ids[0, 1:], ids[1] = -1, torch.tensor([4, 4, 5])
    x = torch.randn(TOKENS, hidden, generator=g).bfloat16()
    return {"x": x, "topk_idx": ids, "topk_weights": torch.rand(TOKENS, TOPK, generator=g), "layout": layout}


def memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    bytes_ = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=torch.uint8).clone().view(dtype)


def combined(
    machine: Machine,
    ranks: LocalBuffers,
    calls: list[dict[str, Any]],
    before: Callable[[list[Any]], None] = lambda pending: None,
) -> tuple[list[Any], list[Any]]:
    """Run the kernels of a combine; return what was prepared, and the results.  `before`: called with the former."""
    pending = [prepare_combine(buffer, **one) for buffer, one in zip(ranks.buffers, calls, strict=True)]
    outs = [combine.finish(buffer.rounds, p) for buffer, p in zip(ranks.buffers, pending, strict=True)]
    before(pending)
    try:
        machine.run([Call(p.args, machine.sizes) for p in pending], RANKS)
    finally:
        machine.forget()
    ranks.check()
    return pending, outs


@pytest.mark.parametrize("place", ["heap", "ring", "packets"])
@pytest.mark.parametrize(
    ("layout", "weighted", "hidden"),
    few([("expert", True, 1032), ("batched", False, 64), ("expert", False, 1032)], ("expert", True, 1032)),
)
def test_a_single_row_travels_as_it_is(
    layout: str, weighted: bool, hidden: int, place: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(rank, hidden, layout) for rank in range(RANKS)]
    how: dict[str, Any] = {"wire": "exact", "weighted": weighted}
    with LocalBuffers(RANKS, hidden=hidden, **SIZES, backend="host") as ranks:
        want = ranks.combine([{"y": here.x, "handle": here.handle, **how} for here in ranks.dispatch(calls)])
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    room = packets.room if place == "packets" else lambda *_: 0
    monkeypatch.setattr(host, "packet_bytes", room)
    with LocalBuffers(RANKS, hidden=hidden, **SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", place == "heap")
        routed = ranks.dispatch(calls)
        ys = [here.x.clone() for here in routed]
        rows = [{"y": y, "handle": here.handle, **how} for y, here in zip(ys, routed, strict=True)]
        pending, outs = combined(machine, ranks, rows)
        assert all(map(torch.equal, outs, want))
        for p, y, here in zip(pending, ys, routed, strict=True):
            assert (p.args.reduced_rows != 0) == (place == "heap")
            if place == "heap":
                check_reduced_rows(p.args, y.flatten(0, -2), here, weighted)


def check_reduced_rows(args: Any, y: torch.Tensor, routed: Any, weighted: bool) -> None:
    """The only row of a token lies in the place of its sum, with its weight behind it."""
    hidden = y.shape[1]
    slots = int((routed.handle.plan.tensor("src", routed)[..., 0] >= 0).sum())  # at most as many flat rows
    singles = 0
    rows_of = memory(args.route.rows, slots * TOPK, torch.int32).view(slots, TOPK)
    src = routed.src.flatten(0, -2)
    tokens = len({(int(s), int(t)) for s, t in src if s >= 0})
    for slot in range(tokens):
        entries = [int(row) for row in rows_of[slot] if row >= 0]
        if len(entries) != 1:
            continue
        singles += 1
        place = args.reduced_rows + slot * 4 * hidden
        assert torch.equal(memory(place, hidden, torch.bfloat16), y[entries[0]])
        weight = routed.row_weights.flatten()[entries[0]] if weighted else torch.tensor(1.0)
        assert torch.equal(memory(place + 2 * hidden, 1, torch.float32)[0], weight)
    assert 0 < singles < tokens
