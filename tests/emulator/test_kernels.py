"""Kernels that cross domains, on CPUs: against the reference, to the bit, with puts that come late and out of order."""

from __future__ import annotations

import platform
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import combine
from moecomm.backends import host
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local

from .machine import Call, Machine

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("g++") is None, reason="wants x86-64 and g++"),
    pytest.mark.timeout(600),
]
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20, "dtype": torch.bfloat16}
DOMAINS = {"ranks": 4, "domain_ranks": 2}
CASES = 20


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("kernels"))


def random_cases(machine: Machine, monkeypatch: pytest.MonkeyPatch, straight: str, cases: int) -> None:
    """Rounds of CPU ranks by the machine; rows go straight to ranks of other domains, those of some do, or none."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    room = host.straight_bytes
    if straight != "all":
        monkeypatch.setattr(host, "straight_bytes", lambda *sizes: room(*sizes) // 256 * 64 * (straight == "some"))
    with LocalBuffers(**DOMAINS, **SIZES, backend="host") as ranks:
        try:
            for seed in range(cases):
                check_case(ranks, random_case(seed, ranks=DOMAINS["ranks"], **SIZES, few_kernels=True))
        finally:
            machine.forget()


def combines(machine: Machine, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """One after the other.  Ranks are rounds apart, and what is put from a place is still on its way when the next
    combine wants the place.
    """
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    with LocalBuffers(**DOMAINS, **SIZES, backend="host") as ranks:
        routed = ranks.dispatch([tokens(rank, layout) for rank in range(len(ranks.buffers))])
        rows = [[here.x * 2.0**power for here in routed] for power in range(8)]  # which scales sums to the bit
        rounds, outs = [], []
        for ys in rows:
            pending = [
                combine.prepare(buffer, y=y, handle=here.handle)
                for buffer, y, here in zip(ranks.buffers, ys, routed, strict=True)
            ]
            rounds += [Call(p.args, machine.sizes) for p in pending]
            outs.append([combine.finish(buffer, p) for buffer, p in zip(ranks.buffers, pending, strict=True)])
        try:
            machine.run(rounds, len(routed))
        finally:
            machine.forget()
        ranks.check()
        assert all(bool(out.any()) for out in outs[0])
        for power, found in enumerate(outs):
            for out, first in zip(found, outs[0], strict=True):
                assert torch.equal(out.float(), first.float() * 2.0**power), f"combine {power}"


def tokens(rank: int, layout: str) -> dict[str, Any]:
    g, count = torch.Generator().manual_seed(rank), 5 + 5 * rank
    idx = torch.rand(count, 8, generator=g).argsort(dim=1)[:, :3]
    x, weights = torch.randn(count, 64, generator=g).bfloat16(), torch.rand(count, 3, generator=g)
    return {"x": x, "topk_idx": idx, "topk_weights": weights, "layout": layout}


@pytest.mark.parametrize("straight", ["all", "some", "none"])
def test_random_cases_across_domains(straight: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    random_cases(machine, monkeypatch, straight, CASES)


@pytest.mark.parametrize("layout", ["expert", "flat"])
def test_combines_one_after_the_other(layout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    combines(machine, monkeypatch, layout)
