"""Combines whose rows travel unsummed: the kernels' bits are those of the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.base import packets
from moecomm.testing import LocalBuffers, check_case
from moecomm.testing import ranks as local
from moecomm.testing.cases import placed, random_placement

from ..combine.test_unsummed import unsummed_cases
from ..few import few
from ..test_batch_invariance import HOST, check_other_tokens
from ..wrap import wrap_after
from .machine import Machine
from .test_kernels import UNEVEN


@pytest.mark.parametrize("balanced", few([None, False, True], None))
@pytest.mark.parametrize(
    ("dtype", "hidden", "cases"),
    few([(torch.bfloat16, 2568, 3), (torch.float16, 64, 20), (torch.float32, 2568, 10)], (torch.bfloat16, 2568, 3)),
)
def test_random_cases(
    dtype: torch.dtype,
    hidden: int,
    cases: int,
    balanced: bool | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where there is room for packets, in which such rows never travel."""
    sizes: dict[str, Any] = {**UNEVEN, "ranks": 4, "hidden": hidden, "dtype": dtype}
    placement = None
    if balanced is not None:
        placement = random_placement(0, **{**sizes, "slots": 5}, balanced=balanced)
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    with LocalBuffers(**sizes, backend="host", placement=placement) as ranks:
        wrap_after(ranks, cases, kernels=True)
        try:
            for case in unsummed_cases(sizes, range(2 * cases), few_kernels=True):
                check_case(ranks, placed(case))
        finally:
            machine.forget()


@pytest.mark.parametrize(
    ("layout", "wires"),
    few([("expert", ("exact", "rows")), ("batched", (None, "int8")), ("flat", (None,))], ("expert", ("exact", "rows"))),
)
def test_other_tokens_change_nothing(
    layout: str, wires: tuple[Any, ...], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens travel in packets, more are pulled."""
    room = packets.room
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", lambda ranks, max_tokens, row: room(ranks, 10, row))
    try:
        check_other_tokens(layout, None, HOST, wires)
    finally:
        machine.forget()
