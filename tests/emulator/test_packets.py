"""Lines of packets that kernels store: as many as a row's content fills, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.base import packets
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_dispatch
from moecomm_bench import stored

from ..few import few
from .machine import Machine
from .test_mutants import PLAIN

RANKS, EXPERTS, TOKENS = 2, 16, 3

FP8, UE8M0 = {"quantize": "fp8"}, {"quantize": "fp8", "scale_format": "ue8m0"}
# Layout, topk, columns, what dispatch and combine do with them; lines of a row that is sent, and of one that returns.
# 7168 columns in bfloat16 are 1792 words of 8 bytes, 224 of them in each of 8 packets. A line has 15. The first packet
# of a row also has topk words. The others have them if rows are not flat and these words fill no line of their own. The
# last packet has as few lines as its content takes.
ROWS: list[tuple[str, int, int, dict[str, Any], dict[str, Any], int, int]] = [
    ("flat", 8, 7168, {}, {}, 16 + 7 * 15, 8 * 15),
    ("expert", 8, 7168, {}, {}, 16 + 7 * 15, 8 * 15),
    ("batched", 8, 7168, {}, {}, 16 + 7 * 15, 8 * 15),
    ("flat", 8, 7168, FP8, {}, 4 * 16, 8 * 15),
    ("batched", 8, 7168, FP8, {"wire": "fp8"}, 4 * 16, 8 * 8),
    ("flat", 8, 7168, UE8M0, {}, 10 + 6 * 9, 8 * 15),
    ("expert", 8, 7168, UE8M0, {}, 10 + 6 * 9, 8 * 15),
    ("flat", 8, 5120, {}, {}, 5 * 15 + 14, 5 * 15 + 14),
    ("flat", 8, 4096, FP8, {"wire": "fp8"}, 2 * 14 + 9, 4 * 8 + 5),
    ("expert", 8, 4096, FP8, {"wire": "int8"}, 2 * 14 + 10, 4 * 8 + 5),
    ("batched", 4, 2880, FP8, {"wire": "fp8"}, 14 + 12, 3 * 7 + 5),
    ("expert", 8, 7168, {}, {"wire": "exact"}, 16 + 7 * 15, 15 * 16),
    ("expert", 1, 7168, {}, {"wire": "exact"}, 8 * 15, 15 * 8),  # a row that is the only one returns as it is
    ("flat", 3, 64, {}, {}, 2, 2),
    ("expert", 3, 64, {}, {}, 2, 2),
]
# Layout, columns, formats of rows that are sent and that return. The last packet has fewer lines than the others.
SHORT: list[tuple[str, int, str | None, str | None]] = [
    ("flat", 2176, "fp8", "fp8"),
    ("expert", 2176, "fp8", "int8"),
    ("batched", 2576, None, None),
    ("expert", 1808, "fp8", "fp8"),
    ("batched", 1360, "fp8", "int8"),
    ("batched", 1952, None, None),
    ("flat", 1200, None, "fp8"),
]


@pytest.mark.parametrize(
    ("layout", "topk", "hidden", "how", "back", "sent", "returned"),
    few(ROWS, ROWS[0], ROWS[1], ROWS[8]),
    ids=lambda value: str(value),
)
def test_lines_of_a_row(
    layout: str,
    topk: int,
    hidden: int,
    how: dict[str, Any],
    back: dict[str, Any],
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
            pending = [prepare_dispatch(buffer, **call) for buffer, call in zip(ranks.buffers, calls, strict=True)]
            assert {stored.of_dispatch(p.args) for p in pending} == {128 * sent}
            routed, found = counted(machine, lambda: ranks.dispatch(calls))
            assert found == (sent * owned.sum(1)).tolist()
            ys = [torch.zeros(*here.x.shape[:-1], hidden, dtype=torch.bfloat16) for here in routed]
            calls = [{"y": y, "handle": here.handle, **back} for y, here in zip(ys, routed, strict=True)]
            _, found = counted(machine, lambda: ranks.combine(calls))
            assert found == (returned * owned.sum(0)).tolist()
            scaled, exact = back.get("wire") in ("fp8", "int8"), back.get("wire") == "exact"
            shape, row = ranks.buffers[0].rounds.session.context.shape, hidden * (1 if scaled else 4 if exact else 2)
            single = float(topk == 1)
            assert stored.of_combine(shape, TOKENS, row, scaled=scaled, exact=exact, single=single) == 128 * returned
        finally:
            machine.forget()


@pytest.mark.parametrize(("layout", "hidden", "quantize", "wire"), few(SHORT, SHORT[0], SHORT[1]))
def test_bits_of_rows_that_end_in_a_short_packet(
    layout: str,
    hidden: int,
    quantize: str | None,
    wire: str | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": 10, "topk": 3, "max_tokens": 8, "dtype": torch.bfloat16}
    with LocalBuffers(3, **sizes, backend="host") as ranks:
        try:
            for seed in range(3):
                case = random_case(seed, ranks=3, **sizes, few_kernels=True, payloads=False)
                how = PLAIN | {"layout": layout, "quantize": quantize, "wire": wire}
                check_case(ranks, replace(case, **how, x=[rows.bfloat16() for rows in case.x]))
        finally:
            machine.forget()


def counted(machine: Machine, run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Run rounds; return their results, and the lines that each rank has stored in them."""
    before = [machine.lines(rank) for rank in range(RANKS)]
    result = run()
    return result, [machine.lines(rank) - before[rank] for rank in range(RANKS)]
