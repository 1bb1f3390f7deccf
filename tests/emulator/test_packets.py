"""Lines of packets that kernels store: as many as a row's content fills, and no more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.base import packets
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from .machine import Machine

RANKS, EXPERTS, TOKENS = 2, 16, 3

# Layout, topk, columns, what dispatch does with them; lines of a row that is sent, and of one that returns.
# 7168 columns in bfloat16 are 1792 words of 8 bytes, 224 of them in each of 8 packets. A line has 15.
ROWS: list[tuple[str, int, int, dict[str, Any], int, int]] = [
    ("flat", 8, 7168, {}, 16 + 7 * 15, 8 * 15),
    ("expert", 8, 7168, {}, 8 * 16, 8 * 15),
    ("flat", 8, 7168, {"quantize": "fp8"}, 4 * 16, 8 * 15),
    ("flat", 8, 7168, {"quantize": "fp8", "scale_format": "ue8m0"}, 10 + 6 * 9, 8 * 15),
    ("flat", 3, 64, {}, 2, 2),
]


@pytest.mark.parametrize(
    ("layout", "topk", "hidden", "how", "sent", "returned"), few(ROWS, ROWS[0]), ids=lambda value: str(value)
)
def test_lines_of_a_row(
    layout: str,
    topk: int,
    hidden: int,
    how: dict[str, Any],
    sent: int,
    returned: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": EXPERTS, "topk": topk, "max_tokens": TOKENS}
    g = torch.Generator().manual_seed(1)
    ids = [torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :topk] for _ in range(RANKS)]
    ids[0][0] = torch.where(ids[0][0] < EXPERTS // RANKS, -1, ids[0][0])  # one rank owns all experts of this token
    owned = torch.zeros(RANKS, RANKS, dtype=torch.int64)  # by source rank and owner: tokens
    for source, rows in enumerate(ids):
        for token in rows.tolist():
            for owner in {expert // (EXPERTS // RANKS) for expert in token if expert >= 0}:
                owned[source, owner] += 1
    with LocalBuffers(RANKS, **sizes, dtype=torch.bfloat16, backend="host") as ranks:
        try:
            x = [torch.randn(TOKENS, hidden, generator=g).bfloat16() for _ in ids]
            calls = [{"x": a, "topk_idx": b, "layout": layout, **how} for a, b in zip(x, ids, strict=True)]
            routed, stored = counted(machine, lambda: ranks.dispatch(calls))
            assert stored == (sent * owned.sum(1)).tolist()
            ys = [torch.zeros(*here.x.shape[:-1], hidden, dtype=torch.bfloat16) for here in routed]
            back = [{"y": y, "handle": here.handle} for y, here in zip(ys, routed, strict=True)]
            _, stored = counted(machine, lambda: ranks.combine(back))
            assert stored == (returned * owned.sum(0)).tolist()
        finally:
            machine.forget()


def counted(machine: Machine, run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Run rounds; return their results, and the lines that each rank has stored in them."""
    before = [machine.lines(rank) for rank in range(RANKS)]
    result = run()
    return result, [machine.lines(rank) - before[rank] for rank in range(RANKS)]
