"""Kernels of ranks that mask others, on CPUs: rows and sums are those of ids of -1, and no wait needs a masked rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.testing import ranks as local

from ..masks import LAYOUTS, Twins, refuses_earlier_handles
from .machine import Machine

SIZES: dict[str, Any] = {"ranks": 4, "hidden": 64, "num_experts": 10, "topk": 3, "max_tokens": 20, "backend": "host"}
SIZES["dtype"] = torch.bfloat16


@pytest.fixture
def twins(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    found = Twins(SIZES)
    yield found
    found.close()
    machine.forget()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [6, 20])
def test_rounds_without_masked_ranks(twins: Twins, layout: str, tokens: int) -> None:
    twins.rounds_while_masked(tokens, layout, {0: 9, 1: 4, 2: 8})


def test_a_rank_may_be_left_alone(twins: Twins) -> None:
    twins.mask([0, 1, 3])
    twins.rounds(0, 20)


def test_handles_end_with_a_mask(twins: Twins) -> None:
    refuses_earlier_handles(twins, [1])
