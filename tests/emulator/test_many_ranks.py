"""More than 16 ranks: blocks share the counts that they add up (shares_columns of csrc/protocol/layout.h)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import host
from moecomm.base import packets
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local

from ..few import few
from ..masks import LAYOUTS, Twins
from ..wrap import rounds_since_wrap, wrap_after
from . import test_row_descriptors as descriptors
from .machine import Machine

SIZES: dict[str, Any] = {"hidden": 16, "topk": 3, "max_tokens": 4, "dtype": torch.bfloat16}
# A lane has one rank, or two, or some lanes have a second one.
RANKS = (17, 40, 64)


def sizes(ranks: int) -> dict[str, Any]:
    """With experts that do not divide, and more columns than a block has threads for some."""
    return {**SIZES, "num_experts": 3 * ranks - 5}


@pytest.mark.parametrize("ranks", few(RANKS, 40))
@pytest.mark.parametrize("way", few(["packets", "some in packets", "rows"], "some in packets"))
def test_random_cases(way: str, ranks: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, share = 4, {"packets": 1, "some in packets": 2, "rows": 0}[way]
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(
        host, "packet_bytes", lambda n, most, row: packets.room(n, -(-most // share), row) if share else 0
    )
    with LocalBuffers(ranks=ranks, **sizes(ranks), backend="host") as buffers:
        wrap_after(buffers, cases, kernels=True)
        try:
            for seed in range(cases):
                check_case(buffers, random_case(seed, ranks=ranks, **sizes(ranks), few_kernels=True))
            assert min(rounds_since_wrap(buffers)) >= 0
        finally:
            machine.forget()


@pytest.mark.long
def test_random_cases_in_domains(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    of_buffer = {**sizes(18), "hidden": 64}  # the machine has the eight lanes of a line load it together
    with LocalBuffers(ranks=18, domain_ranks=9, **of_buffer, backend="host") as buffers:
        try:
            for seed in range(4):
                check_case(buffers, random_case(seed, ranks=18, **of_buffer, few_kernels=True))
        finally:
            machine.forget()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    twins = Twins({**SIZES, "ranks": 18, "num_experts": 40, "backend": "host"})
    try:
        twins.rounds_while_masked(4, layout, {0: 9, 1: 4, 2: 12})
    finally:
        twins.close()
        machine.forget()


@pytest.mark.parametrize("most", few([descriptors.FEW, descriptors.MANY], descriptors.FEW))
def test_row_descriptors(most: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(descriptors, "RANKS", 18)
    monkeypatch.setattr(descriptors, "EXPERTS", 31)
    of_buffer = {"hidden": descriptors.HIDDEN, "num_experts": 31, "topk": descriptors.TOPK, "max_tokens": most}
    with LocalBuffers(18, **of_buffer, backend="host", timeout_s=20) as buffers:
        for first in (7, most // 8):
            ids = [descriptors.routing(first if rank == 0 else rank, rank, torch.int64) for rank in range(18)]
            arrived = descriptors.dispatch(buffers, ids)
            buffers.check()
            descriptors.check(buffers, ids, arrived)
        machine.forget()


@pytest.mark.parametrize("way", few(["packets", "rows"], "packets"))
def test_ranks_that_make_another_call_are_told(way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send no counts: blocks that share the columns end as well."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room if way == "packets" else lambda *_: 0)
    generator = torch.Generator().manual_seed(0)
    calls: list[dict[str, Any]] = [
        {
            "x": torch.randn(3, 16, generator=generator).bfloat16(),
            "topk_idx": torch.rand(3, sizes(18)["num_experts"], generator=generator).argsort(dim=1)[:, :3].contiguous(),
            "topk_weights": torch.rand(3, 3, generator=generator),
        }
        for _ in range(18)
    ]
    with LocalBuffers(18, **sizes(18), backend="host", timeout_s=60) as buffers:
        try:
            routed = buffers.dispatch(calls)
            calls[5] = {"x": calls[5]["x"], "handle": routed[5].handle}
            with pytest.raises(moecomm.Mismatch):
                buffers.dispatch(calls)
        finally:
            machine.forget()
        for buffer in buffers.buffers[1:]:
            with pytest.raises(moecomm.Mismatch):
                buffer.check()
