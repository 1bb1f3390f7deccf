"""The emulated NIC: the same bits as without it, at its bandwidth, latency and message rate."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.backends.emulated_nic import Nic
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local

from .machine import Machine

RANKS, SIZE, TOKENS = 4, 2, 20
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": TOKENS, "dtype": torch.bfloat16}
# The machine's clock has steps of 1000 ns, and rounds without a NIC take hundreds of them.
NICS = {
    "bandwidth": Nic(0.002, 0.0, 1000.0),
    "latency": Nic(10_000.0, 10_000.0, 1000.0),
    "message rate": Nic(10_000.0, 0.0, 0.003),
}
FAST = Nic(10_000.0, 0.0, 1000.0)


def others(rank: int) -> list[int]:
    return [peer for peer in range(RANKS) if peer // SIZE != rank // SIZE]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("limit", NICS)
def test_rounds_take_as_long_as_the_wire(
    limit: str, direct: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[tuple[int, int]] = []  # of each round: ns, and the least that it may take

    def run(args: Sequence[Any]) -> None:
        begin, nic = machine.now(), machine.nic
        assert nic is not None
        puts = [[machine.puts(rank, peer) for peer in range(RANKS)] for rank in range(RANKS)]
        sent = [machine.put_bytes(rank) for rank in range(RANKS)]
        machine.run_all(args)
        end, least = machine.now(), 0.0
        for rank in range(RANKS):
            messages = sum(machine.puts(rank, peer) - puts[rank][peer] for peer in range(RANKS))
            assert messages >= len(others(rank)), "tagged words"
            processor, wire = messages / nic.mega_messages * 1000, (machine.put_bytes(rank) - sent[rank]) / nic.gbs
            least = max(least, processor, wire)
            free = machine.links[rank][RANKS + 3 :].tolist()
            assert begin + processor <= free[0] and begin + wire <= free[1], "both were taken for all of it"
        # Rows leave after the tagged words have come, or with them.
        took.append((end - begin, int(least + 1000 * nic.latency_us)))

    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=run))
    if not direct:
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    monkeypatch.setattr(machine, "nic", NICS[limit])
    with LocalBuffers(RANKS, domain_ranks=SIZE, **SIZES, backend="host") as ranks:
        try:
            for seed in range(2):
                check_case(ranks, random_case(seed, ranks=RANKS, **SIZES, few_kernels=True))
        finally:
            machine.forget()
    assert len(took) >= 4 and all(ns >= least > 0 for ns, least in took)


@pytest.mark.parametrize("chunk_tokens", [4, 16, 32])
def test_warps_that_share_a_chunk_send_the_same_bits(
    chunk_tokens: int, machine: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As on GIN's proxy: see ReturnForward."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.in_chunks(chunk_tokens)))
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    monkeypatch.setattr(machine, "nic", FAST)
    long = {**SIZES, "max_tokens": 150}
    with LocalBuffers(RANKS, domain_ranks=SIZE, **long, backend="host") as ranks:
        try:
            for seed in range(max(4, request.config.getoption("--cases") or 0)):
                check_case(ranks, random_case(seed, ranks=RANKS, **long, few_kernels=True))
        finally:
            machine.forget()
