"""Masks over several domains, by kernels: living ranks forward in place of masked ones, with the bits of ids of -1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.ranks import settings
from moecomm.testing import ranks as local

from ..few import few
from ..masks import LAYOUTS, Twins, refuses_earlier_handles
from .machine import Machine

SIZES: dict[str, Any] = {"hidden": 64, "topk": 3, "max_tokens": 70, "backend": "host", "dtype": torch.bfloat16}


def open_twins(ranks: int, domain_ranks: int) -> Twins:
    return Twins({**SIZES, "ranks": ranks, "domain_ranks": domain_ranks, "num_experts": 2 * ranks + 1})


@pytest.fixture
def by_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    yield
    machine.forget()


@pytest.fixture
def forwarded(forwarded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_TRIPS", 1)


@pytest.mark.parametrize("layout", few(LAYOUTS, "expert"))
@pytest.mark.parametrize(
    ("ranks", "domain_ranks", "steps"),
    [(4, 2, [[1], [2]]), (6, 2, [[3], [0], [2]]), (6, 3, [[4], [3], [0]])],
    ids=["two domains of two", "three domains, one of which goes", "two domains of three"],
)
def test_others_stand_in(
    by_kernels: None, forwarded: None, layout: str, ranks: int, domain_ranks: int, steps: list[list[int]]
) -> None:
    twins = open_twins(ranks, domain_ranks)
    try:
        twins.rounds_after_masks(steps, 69, {0: 2 * ranks}, layout=layout)
    finally:
        twins.close()


def test_direct_rows_need_no_forwarder(by_kernels: None) -> None:
    twins = open_twins(6, 2)
    try:
        twins.rounds_after_masks([[3], [0], [2]], 9, {0: 12}, layout="expert")
    finally:
        twins.close()


def test_handles_end_with_a_mask(by_kernels: None, forwarded: None) -> None:
    twins = open_twins(4, 2)
    try:
        refuses_earlier_handles(twins, [1])
    finally:
        twins.close()
