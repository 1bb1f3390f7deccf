"""The ring that traced kernels fill: records come back in order, to their owners, and lost ones are counted."""

from __future__ import annotations

import random
import re

import pytest
import torch

from moecomm.gpu.loader import headers
from moecomm.gpu.span_ring import RECORD_BYTES, SpanRing, Write, owner_of
from moecomm.observe.tracing.files import ROLES, ClockPoint, DeviceSpan, decode, on_host

OWNERS = (64 * 5, 64 * 9)


class Kernel:
    """Writes records as csrc/device/trace.cuh does."""

    def __init__(self, size: int, before: int = 0) -> None:
        self.records, self.next = torch.zeros(size, 8, dtype=torch.int32), before
        self.ring = SpanRing(self.records, torch.zeros(1, dtype=torch.int32))
        self.ring._taken = before
        self.found: dict[int, list[DeviceSpan]] = {owner: [] for owner in OWNERS}
        self.lost = 0
        for nth in range(before - size, before) if before else ():
            self.write(OWNERS[0], nth)
        for owner in OWNERS:
            assert self.ring.watch(owner, self._writer(owner))

    def _writer(self, owner: int) -> Write:
        def write(content: bytes, lost: int) -> None:
            assert len(content) % RECORD_BYTES == 0
            self.found[owner] += decode(content)
            self.lost += lost if owner == OWNERS[0] else 0

        return write

    def claim(self) -> int:
        self.next += 1
        return self.next - 1

    def write(self, owner: int, nth: int, halves: int = 3) -> None:
        row, number = self.records[nth % len(self.records)], word(nth + 1)
        if halves & 1:
            row[:4] = torch.tensor([word(1000 * nth), word(1000 * nth >> 32), number, word(nth % (1 << 31))])
        if halves & 2:
            row[4:] = torch.tensor([7, number, word(owner_of(owner)), 2 | 3 << 8])


def word(value: int) -> int:
    """The int32 of the same bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def test_the_names_of_roles_are_those_of_the_kernels() -> None:
    text = (headers() / "device" / "trace.cuh").read_text()
    named = re.search(r"enum class Role : u32 \{(.*?)\};", text, re.DOTALL)
    assert named is not None
    assert tuple(re.findall(r"\w+", named[1])) == ROLES


@pytest.mark.parametrize("before", [0, (1 << 32) - 700], ids=["from 0", "across the end of 32 bits"])
def test_records_come_back_to_their_owners_in_order(before: int) -> None:
    kernel, choose = Kernel(1024, before), random.Random(0)
    wanted: dict[int, list[int]] = {owner: [] for owner in OWNERS}
    for _ in range(10):
        for _ in range(choose.randrange(400)):
            owner, nth = choose.choice(OWNERS), kernel.claim()
            kernel.write(owner, nth)
            wanted[owner].append(nth)
        kernel.ring.drain()
    for owner in OWNERS:
        assert [span.begin_ns for span in kernel.found[owner]] == [1000 * nth for nth in wanted[owner]]
    assert kernel.lost == 0
    span = kernel.found[OWNERS[0]][0]
    assert (span.name, span.track, span.end_ns - span.begin_ns) == ("send", "block 3 send", 7)


@pytest.mark.parametrize("halves", [0, 1, 2])
def test_a_record_that_has_not_come_is_waited_for(halves: int) -> None:
    kernel = Kernel(64)
    late = kernel.claim()
    kernel.write(OWNERS[0], late, halves)
    kernel.write(OWNERS[0], kernel.claim())
    kernel.ring.drain()
    assert kernel.found[OWNERS[0]] == []
    kernel.write(OWNERS[0], late)
    kernel.ring.drain()
    assert len(kernel.found[OWNERS[0]]) == 2


@pytest.mark.parametrize("more", [1, 100, 1023, 1024, 1025, 5000])
def test_records_that_were_overwritten_are_counted(more: int) -> None:
    kernel = Kernel(1024)
    for _ in range(1024 + more):
        kernel.write(OWNERS[0], kernel.claim())
    kernel.ring.drain()
    assert kernel.lost == more
    assert [span.begin_ns for span in kernel.found[OWNERS[0]]] == [1000 * nth for nth in range(more, 1024 + more)]


def test_records_of_nobody_are_dropped() -> None:
    kernel = Kernel(64)
    kernel.write(64 * 77, kernel.claim())
    kernel.write(OWNERS[1], kernel.claim())
    kernel.ring.drain()
    assert [len(found) for found in kernel.found.values()] == [0, 1]


def test_two_ranks_whose_records_look_the_same_are_told_apart() -> None:
    kernel = Kernel(64)
    same = OWNERS[0] + 64 * (1 << 32)
    assert not kernel.ring.watch(same, lambda content, lost: None)
    kernel.ring.forget(same, lambda content, lost: None)  # not that of the first
    kernel.write(OWNERS[0], kernel.claim())
    kernel.ring.drain()
    assert len(kernel.found[OWNERS[0]]) == 1


def test_times_of_a_gpu_are_drawn_on_the_clock_of_the_host() -> None:
    points = [ClockPoint(1000, 51_000, 5), ClockPoint(2000, 52_010, 5), ClockPoint(4000, 54_010, 5)]
    assert on_host(points[:1], 700) == 50_700
    assert [on_host(points, time) for time in (1000, 1500, 2000, 3000, 4000, 5000)] == [
        *(51_000, 51_505, 52_010, 53_010, 54_010, 55_010)
    ]


def test_a_role_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="role"):
        list(decode(b"\xff" * RECORD_BYTES))
