"""Transfers of weights by the kernels of GPUs, between CPU ranks: whole calls of stage() and commit()."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecomm.errors import CorruptWeights
from moecomm.gpu import plain_kernel
from moecomm.transfer import gpu, weight_transfer
from moecomm.transfer.records import Leaving, Records

from ..backends.conftest import all_ranks
from ..few import few
from ..weight_transfers import APART, CASTS, EXPERTS, Model, beside, passed, transfers
from .machine import Machine
from .test_plain_kernels import launcher


@pytest.fixture(autouse=True)
def kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of kernels that transfers launch."""
    launched: list[str] = []
    launch, lock = launcher(machine.scheduler, machine.library, launched), threading.Lock()

    def one_by_one(device: torch.device, kernel: plain_kernel.PlainKernel, blocks: int, args: ctypes.Structure) -> None:
        with lock:
            launch(device, kernel, blocks, args)

    def carrier(records: Records) -> gpu.GpuCarrier:
        return gpu.GpuCarrier(records, torch.device("cpu"))

    monkeypatch.setattr(plain_kernel, "launch_on", one_by_one)
    monkeypatch.setattr(weight_transfer, "HostCarrier", carrier)
    yield launched
    assert launched


@pytest.mark.parametrize("seed", few(range(40), 3, 8, 10))
def test_transfers_leave_what_the_specification_casts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of one expert, of some, and of all."""
    monkeypatch.setattr(gpu, "_LEAST_BATCH", (1, 20_000, 1 << 30)[seed % 3])
    model = Model({"w13": (6, 48), "w2": (20, 34), "w3": (2, 128, 16)}, torch.bfloat16, CASTS[seed % len(CASTS)], seed)
    source, target = (beside(some, 4, 2 * seed + n, EXPERTS) for n, some in enumerate(([0, 1, 2], [1, 2, 3])))

    def body(group: Any) -> None:
        with transfers(group, model, source, target) as (transfer, found, have, want):
            for step in (1, 2):
                transfer.stage(model.given(step, have))
                transfer.commit(passed(want, found))
                model.check(found, want, step)

    all_ranks(4, body)


def test_a_flipped_byte_is_found_and_a_stage_takes_few_launches(kernels: list[str]) -> None:
    model = Model({"w13": (128, 32), "w2": (32, 64)}, torch.bfloat16, "nvfp4", 1)

    def body(group: Any) -> None:
        with transfers(group, model, *APART) as (transfer, found, have, want):
            transfer.stage(model.given(1, have))
            transfer.commit(passed(want, found))
            write = transfer._carrier.write

            def broken(leaving: list[Leaving], number: int) -> None:
                write(leaving, number)
                leaving[-1].record[0] ^= 1

            if group.rank == 1:
                transfer._carrier.write = broken
            with pytest.raises(CorruptWeights, match="'w13' of expert 5"):
                transfer.stage(model.given(2, have))
            model.check(found, want, 1)

    all_ranks(4, body)
    casts = sum(name.startswith("cast_weights") for name in kernels)
    assert casts == sum(name.startswith("find_largest") for name in kernels) == 4  # a stage of a rank, for all experts
    assert len(kernels) <= 2 * (4 * 2 + 2 * 4) + 2  # each of two stages; two switches
