"""Rounds across domains through NVSHMEM, by stand-ins for its functions that order no more than it does."""

from __future__ import annotations

import pytest

from ..few import few
from .machine import Machine
from .test_kernels import random_cases


@pytest.mark.parametrize(
    ("direct", "cases", "hidden"),
    few([("some", 2, 64), *((way, 10, 64) for way in ("all", "some", "none")), ("none", 3, 2568)], ("some", 2, 64)),
)
def test_random_cases_across_domains(
    direct: str, cases: int, hidden: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "transport", "nvshmem")
    random_cases(machine, monkeypatch, direct, cases, hidden)
