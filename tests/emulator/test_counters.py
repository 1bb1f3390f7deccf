"""Counters of kernels on CPUs: exactly the rows of the routing, and waits for peers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.observe.stats import JobStats
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from ..stats.test_counters import EXPERTS, HIDDEN, RANKS, SIZES, check, expected, routing, x_of
from .machine import Machine


@pytest.mark.parametrize("way", few(["packets", "chunks", "domains"], "packets"))
@pytest.mark.parametrize("layout", few(["expert", "flat", "batched"], "expert"))
def test_rows_are_those_of_the_routing(
    layout: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    if way == "chunks":
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    more: dict[str, Any] = {"domain_ranks": 2} if way == "domains" else {}
    ids = routing(1)
    with LocalBuffers(RANKS, **SIZES, **more) as ranks:
        try:
            calls = [{"x": x_of(own), "topk_idx": own, "layout": layout} for own in ids]
            routed = ranks.dispatch(calls)
            ranks.combine([{"y": torch.zeros_like(one.x), "handle": one.handle} for one in routed])
            job = counters(ranks)
            rows, experts = expected(ids)
            check(job, rows, experts, 2 * HIDDEN, 2)
            assert int(job.wait_ns[0].sum()) > 0, "some rank has waited for a header"
            ranks.dispatch([{"x": x_of(own), "handle": one.handle} for own, one in zip(ids, routed, strict=True)])
            check(counters(ranks), 2 * rows, 2 * experts, 2 * HIDDEN, 3)
            for buffer in ranks.buffers:
                buffer.reset_stats()
            none = torch.zeros(RANKS, RANKS, dtype=torch.int64)
            check(counters(ranks), none, torch.zeros(EXPERTS, dtype=torch.int64), 0, 0)
        finally:
            machine.forget()


def counters(ranks: LocalBuffers) -> JobStats:
    return JobStats.of_ranks([buffer.stats() for buffer in ranks.buffers])
