"""Ranks that are killed at named points of rounds, and while ranks open, shrink, grow and mask: the others go on."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import backends
from moecomm.backends.host import HostSession
from moecomm.membership.masking import Masking
from moecomm.membership.meeting import Meeting
from moecomm.ranks.opening import Opening
from moecomm.ranks.pages import Pages
from moecomm.ranks.settings import Settings
from moecomm.rounds.rounds import Rounds

from ..conftest import Ranks
from ..few import few
from ..live import FAR_S, ROOM_S
from .test_masking import rounds
from .test_membership import SIZES, die_in_a_round, sums, until_it_fails

EXACT = 100  # exact rounds that the ranks that are left make
TIMEOUT_S, SOON_S = FAR_S, ROOM_S  # no survivor waits for the deadline
OPENING = [(Settings, "agree"), (backends, "open_session"), (Opening, "settle")]
MEETING = [(Meeting, "_decided"), (Pages, "decide"), *OPENING, (Rounds, "retire")]
MASKING = [(Masking, "_decided"), (HostSession, "resume"), (Masking, "_begin_anew"), (Masking, "_settle")]
ROUND: list[tuple[Any, str]] = [(moecomm.Buffer, name) for name in ("dispatch_begin", "dispatch_end", "combine")]


@dataclass(frozen=True)
class Point:
    """A place where a rank dies: before or after its call of a function of `owner`."""

    owner: Any
    name: str
    after: bool
    victim: int

    def arm(self) -> None:
        inner = getattr(self.owner, self.name)

        def call(*args: Any, **options: Any) -> None:
            if self.after:
                inner(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(self.owner, self.name, call)

    def __str__(self) -> str:
        owner = self.owner.__name__.rpartition(".")[2]
        return f"rank {self.victim} {'after' if self.after else 'before'} {owner}.{self.name}"


def points(places: list[tuple[Any, str]], *victims: int) -> list[Point]:
    return [Point(*place, after, victim) for victim in victims for place in places for after in (False, True)]


def cases(every: list[Point]) -> Any:
    """Run each tenth point; with `-m long`, the others."""
    return pytest.mark.parametrize("point", few(every, *every[::10]), ids=str)


def go_on(buffer: moecomm.Buffer, left: int) -> int:
    """Shrink until so many ranks are left, which make exact rounds.  Return the number of losses."""
    made = losses = 0
    while made < EXACT or buffer.num_ranks != left:
        try:
            sums(buffer)
            made += 1
        except moecomm.PeerLost:
            buffer.shrink()
            made, losses = 0, losses + 1
    buffer.close()
    return losses


def in_a_round(rank: int, group: Any, point: Point) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=TIMEOUT_S)
    sums(buffer)
    if rank == point.victim:
        point.arm()
    with suppress(moecomm.PeerLost):
        routed = buffer.dispatch_begin(torch.ones(8, 64).bfloat16(), torch.arange(24).view(8, 3) % 10)
        routed = buffer.dispatch_end(routed)
        buffer.combine(routed.x, routed.handle)
    return go_on(buffer, 2)


@cases(points(ROUND, 0, 1))
def test_in_a_round(ranks: Ranks, point: Point) -> None:
    ranks.start(3, in_a_round, point)
    assert ranks.results(2, SOON_S) == {rank: 1 for rank in range(3) if rank != point.victim}


def while_opening(rank: int, group: Any, point: Point) -> Any:
    if rank == point.victim:
        point.arm()
    try:
        buffer = moecomm.Buffer(group, **SIZES, timeout_s=TIMEOUT_S)
    except moecomm.PeerLost as error:
        return error.peer
    return "open", go_on(buffer, 2)


@cases([point for point in points(OPENING, 0, 1) if point.after or point.name != "agree"])
def test_while_ranks_open(ranks: Ranks, point: Point) -> None:
    """Kills begin after a rank's first message: before it, no rank knows the process, as if the rank never came."""
    ranks.start(3, while_opening, point)
    want = ("open", 1) if (point.name, point.after) == ("settle", True) else point.victim
    assert ranks.results(2, SOON_S) == {rank: want for rank in range(3) if rank != point.victim}


def while_shrinking(rank: int, group: Any, point: Point) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=TIMEOUT_S)
    sums(buffer)
    if rank == 3:
        die_in_a_round(buffer)
    until_it_fails(buffer)
    if rank == point.victim:
        point.arm()
    buffer.shrink()
    go_on(buffer, 2)
    return "exact"


@cases(points(MEETING, 0, 1))
def test_while_ranks_shrink(ranks: Ranks, point: Point) -> None:
    ranks.start(4, while_shrinking, point)
    assert ranks.results(2, SOON_S) == {rank: "exact" for rank in range(3) if rank != point.victim}


def while_growing(rank: int, group: Any, point: Point) -> Any:
    """Rank 3 joins.  If an old rank is lost before all are in the Buffer, rank 3 stays out; the old ranks shrink."""
    first, new = dist.new_group([0, 1, 2]), rank == 3
    if not new:
        buffer = moecomm.Buffer(first, **SIZES, timeout_s=TIMEOUT_S)
        sums(buffer)
    if rank == point.victim:
        point.arm()
    try:
        if new:
            buffer = moecomm.Buffer(group, **SIZES, timeout_s=TIMEOUT_S)
        else:
            buffer.grow(group)
    except moecomm.PeerLost:
        if new:
            return "not grown"
    grown = buffer.num_ranks == 4
    go_on(buffer, 3 if grown or point.victim == 3 else 2)
    return "grown" if grown else "not grown"


@cases([*points([*OPENING[1:], (Rounds, "retire")], 0, 1), *points(OPENING[1:], 3)])
def test_while_ranks_grow(ranks: Ranks, point: Point) -> None:
    ranks.start(4, while_growing, point)
    want = "grown" if point.name == "retire" or (point.name, point.after) == ("settle", True) else "not grown"
    assert ranks.results(3, SOON_S) == {rank: want for rank in range(4) if rank != point.victim}


def while_masking(rank: int, group: Any, point: Point) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=TIMEOUT_S)
    rounds(buffer, 3)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == point.victim:
        point.arm()
    while set(buffer.masked) != {3, point.victim}:
        try:
            rounds(buffer, 1)
        except moecomm.PeerLost:
            buffer.mask()
    rounds(buffer, EXACT)
    return "exact"


@cases(points(MASKING, 0, 1))
def test_while_ranks_mask(ranks: Ranks, point: Point) -> None:
    ranks.start(4, while_masking, point)
    assert ranks.results(2, SOON_S) == {rank: "exact" for rank in range(3) if rank != point.victim}
