"""Every seeded bug of a kernel must make rounds end with other bits, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moecomm.backends import host
from moecomm.base import packets
from moecomm.base.placement import Placement
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local
from moecomm.testing.cases import random_placement

from ..native.mutants import Mutant
from . import machine as machines
from . import plain
from .device_mutants import MUTANTS
from .machine import Machine, units
from .test_emulated_nic import FAST
from .test_kernels import DOMAINS
from .test_replicate import SHAPES, check_choices
from .units import Units, edited

pytestmark = pytest.mark.long
# Rows have several pieces, and more tokens than there are places in a ring.
SIZES: dict[str, Any] = {"hidden": 2568, "num_experts": 10, "topk": 3, "max_tokens": 80, "dtype": torch.bfloat16}
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("begin", "weight_grads", "in_window", "again"), False),
    **dict.fromkeys(("quantize", "scales", "wire", "own_weights", "max_rows")),
    "scale_layout": "row",
    "layout": "expert",
    "alignment": 1,
    "weighted": True,
}
PLACED = random_placement(0, ranks=4, num_experts=10, slots=5)
HELD = [[0, 1, 2, 3, 4], [5, 6, 7, 0, 1], [8, 9, 0, 2, 5], [0, 1, 2, 8, 9]]
PACKETS: dict[str, Any] = {"ranks": 4, "packet_bytes": packets.room, "max_tokens": 20}
# How many bytes there are for packets and for direct rows, and how many tokens a chunk has over an emulated NIC.
WAYS: dict[str, dict[str, Any]] = {
    "packets": PACKETS,
    "flat packets": {**PACKETS, "layout": "flat"},
    "shared entries": {**PACKETS, "hidden": 2176, "quantize": "fp8"},
    "short packets": {**PACKETS, "hidden": 2576, "quantize": "fp8"},
    "rows": {"ranks": 4, "packet_bytes": lambda *_: 0},
    "unsummed rows": {"ranks": 4, "packet_bytes": lambda *_: 0, "wire": "rows"},
    "forwarders": {**DOMAINS, "direct_bytes": lambda *_: 0},
    "shared chunks": {**DOMAINS, "direct_bytes": lambda *_: 0, "chunk_tokens": 16},
    "straight": {**DOMAINS, "max_tokens": 20},
    "forwarders by NVSHMEM": {**DOMAINS, "direct_bytes": lambda *_: 0, "transport": "nvshmem"},
    "placed packets": {**PACKETS, "placement": PLACED},
    "placed rows": {"ranks": 4, "packet_bytes": lambda *_: 0, "placement": PLACED},
    "balanced": {"ranks": 4, "packet_bytes": lambda *_: 0, "placement": Placement(HELD, choice="balanced")},
    "copies": {},  # see test_replicate.py
    # Sums that are cast, in rows that end inside of a block of scales.
    "casts": {"ranks": 4, "packet_bytes": lambda *_: 0, "hidden": 2576, "wire": "int8"},
    "casts in packets": {**PACKETS, "hidden": 2576, "wire": "int8"},
    "casts, straight": {**DOMAINS, "max_tokens": 20, "hidden": 2576, "wire": "int8"},
}
ALONE = ("dispatch/choose.cuh",)  # headers of one kernel, which include all that it needs
SEEDS = 3
LIMIT_S = 240
NOT_COMPILED = 3


def rounds(way: str, machine: Machine) -> None:
    """Compare rounds by the machine with the reference."""
    if way == "copies":
        for shape in SHAPES[:-1]:
            check_choices(range(12), shape, machine)
        return
    sizes = {**SIZES, **WAYS[way]}
    rooms = {name: sizes.pop(name) for name in ("packet_bytes", "direct_bytes") if name in sizes}
    chunk_tokens = sizes.pop("chunk_tokens", 0)
    kind = PLAIN | {name: sizes.pop(name) for name in ("wire", "layout", "quantize") if name in sizes}
    transport = sizes.pop("transport", "puts")
    run, nic = (machine.in_chunks(chunk_tokens), FAST) if chunk_tokens else (machine.run_all, None)
    of_case = {name: size for name, size in sizes.items() if name not in ("domain_ranks", "placement")}
    with (
        mock.patch.multiple(host, ring_tokens=lambda *_: 32, **rooms),
        mock.patch.object(local, "_native", SimpleNamespace(host_run_all=run)),
        mock.patch.multiple(machine, nic=nic, transport=transport),
        LocalBuffers(**sizes, backend="host") as ranks,
    ):
        for buffer in ranks.buffers:
            buffer.rounds.session.reduced_rows_in_heap = False
        try:
            for seed in range(SEEDS):
                case = random_case(seed, **of_case, few_kernels=True, payloads=False)
                x = [rows.to(sizes["dtype"]) for rows in case.x]
                check_case(ranks, replace(case, **kind | {"x": x}))
        finally:
            machine.forget()


def library(mutant: Mutant) -> Callable[[str], Any]:
    """Return what loads units, those of the mutant's kernel with its edit."""
    own = Units(edited(plain.write, mutant.file, mutant.old, mutant.new), "cuda.h")
    kernel = mutant.file.partition("/")[0]
    included = f'"{mutant.file}"' if mutant.file in ALONE else f'"{kernel}/'
    return lambda unit: (own if included in unit else units()).library(unit)


def with_an_edit(mutant: Mutant) -> None:
    """Run a mutant's rounds in a process of its own, which may end in any way."""
    machine = Machine()
    machine.library = library(mutant)
    try:
        rounds(mutant.caught_by, machine)
    except subprocess.CalledProcessError:  # of the compiler
        os._exit(NOT_COMPILED)


@pytest.fixture(scope="module")
def intact() -> None:
    """Rounds of every way by intact kernels, which are then compiled."""
    for way in WAYS:
        rounds(way, Machine())


@pytest.fixture(scope="module")
def ended(intact: None) -> dict[str, int | None]:
    """The exit code of each mutant's process; None: it had to be killed."""
    context = multiprocessing.get_context("fork")

    def end_of(mutant: Mutant) -> int | None:
        process = context.Process(target=with_an_edit, args=(mutant,))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None
        return process.exitcode

    with mock.patch.object(machines, "LIMIT", 20_000), ThreadPoolExecutor(2) as pool:
        return dict(zip((mutant.name for mutant in MUTANTS), pool.map(end_of, MUTANTS), strict=True))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, ended: dict[str, int | None]) -> None:
    assert ended[mutant.name] not in (0, NOT_COMPILED, None)
