"""Pairs of calls that ranks make at once: a named error everywhere, and then a second try that works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import moecomm

HIDDEN = 64
PAIR_S = 1.0  # timeout of a pair of calls
TRIED = 2  # exact rounds after a second try
AT_ONCE = 16  # pairs, which wait most of the time


class Member:
    """One rank of a Buffer of three, which makes one call while others may make another, and then tries again."""

    def __init__(self, group: Any, meet: threading.Barrier) -> None:
        self.group, self._meet = group, meet
        self.buffer = moecomm.Buffer(group, **PAIRED)
        self.x, self.ids = torch.ones(4, HIDDEN), torch.arange(8).view(4, 2) % 6
        self.routed: Any = self.buffer.dispatch(self.x, self.ids)

    def meet(self) -> None:
        self._meet.wait(60)

    def close(self) -> None:
        self.buffer.close()

    def round(self) -> None:
        routed = self.buffer.dispatch(self.x, self.ids)
        assert torch.equal(self.buffer.combine(routed.x, routed.handle), 2 * self.x)


def layer(member: Member) -> None:
    local = len(member.buffer.local_experts)
    member.buffer.moe(member.x, member.ids, None, torch.ones(local, 16, HIDDEN), torch.ones(local, HIDDEN, 8))


def release(member: Member) -> None:
    member.routed = None  # which would be an output
    member.buffer.release_memory()


# By name: a call, and words of which errors of ranks that wait for it elsewhere have one; none: it waits for nobody.
ALL_CALLS: dict[str, tuple[Callable[[Member], Any], tuple[str, ...]]] = {
    "dispatch": (lambda m: m.buffer.dispatch(m.x, m.ids), ("dispatch",)),
    "flat": (lambda m: m.buffer.dispatch(m.x, m.ids, layout="flat"), ("dispatch", "flat")),
    "repeat": (lambda m: m.buffer.dispatch(m.x, handle=m.routed.handle), ("dispatch", "handle")),
    "halves": (lambda m: m.buffer.dispatch_end(m.buffer.dispatch_begin(m.x, m.ids)), ("dispatch",)),
    "combine": (lambda m: m.buffer.combine(m.routed.x, m.routed.handle), ("combine",)),
    "moe": (layer, ("dispatch", "wire", "layout")),
    "shrink": (lambda m: m.buffer.shrink(), ("shrink()", "closed this Buffer")),
    "shrink, ids kept": (lambda m: m.buffer.shrink(keep_ids=True), ("shrink(keep_ids=True)", "closed this Buffer")),
    "mask": (lambda m: m.buffer.mask(), ("mask()", "have masked this one")),
    "mask a rank": (lambda m: m.buffer.mask([2 if m.group.rank == 1 else 1]), ("mask()", "have masked this one")),
    "unmask": (lambda m: m.buffer.unmask([1]), ("unmask()", "have masked this one")),
    "grow": (lambda m: m.buffer.grow(m.group), ("grow()", "open")),
    "open": (lambda m: moecomm.Buffer(m.group, **PAIRED).close(), ("Buffer()", "open")),
    "open a Window": (lambda m: moecomm.Window(m.group, 4096, timeout_s=PAIR_S, device="cpu").close(), ("Window",)),
    "release": (release, ("release_memory",)),
    "restore": (lambda m: m.buffer.restore(), ()),
    "close": (lambda m: m.buffer.close(), ()),
    "abort": (lambda m: m.buffer.abort(), ()),
    "check": (lambda m: m.buffer.check(), ()),
}
PAIRED: dict[str, Any] = {
    "hidden": HIDDEN,
    "num_experts": 6,
    "topk": 2,
    "max_tokens": 8,
    "dtype": torch.float32,
    "backend": "host",
    "timeout_s": PAIR_S,
}
ROUNDS = ("dispatch", "flat", "repeat", "halves", "combine", "moe")  # whose headers say which they are
ENDS = (moecomm.Mismatch, moecomm.RoundFailed, moecomm.Excluded, moecomm.Closed, moecomm.MemoryReleased)


def ends_of(one: str, other: str) -> list[Any]:
    """Make a call on ranks 0 and 2 and another on rank 1; then shrink() and rounds.  Return how each call has ended."""
    calls = [one, other, one]
    ends: list[Any] = [None] * 3
    left: list[Any] = [None] * 3
    meet = threading.Barrier(3)

    def run(rank: int, group: Any) -> None:
        try:
            member = Member(group, meet)
            member.meet()
            try:
                ALL_CALLS[calls[rank]][0](member)
            except ENDS as error:
                ends[rank] = error.with_traceback(None)
            member.meet()
            try:
                found = member.buffer.shrink()
            except (moecomm.Excluded, moecomm.Closed):
                left[rank] = ()
            else:
                left[rank] = found.ranks, member.buffer.num_ranks
                for _ in range(TRIED):
                    member.round()
            member.meet()
            member.close()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            ends[rank] = error
            meet.abort()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(moecomm.local_ranks(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in ends:
        if isinstance(error, BaseException) and not isinstance(error, ENDS):
            raise AssertionError(f"{one} on ranks 0 and 2, {other} on rank 1: {ends}") from error
    return ends


def check_pair(pair: tuple[str, str]) -> None:
    one, other = pair
    if one in ROUNDS and other in ROUNDS:
        ends_of(one, other)
        return
    words = ALL_CALLS[one][1], ALL_CALLS[other][1]
    for rank, end in enumerate(ends_of(one, other)):
        mine, theirs = words if rank != 1 else words[::-1]
        if isinstance(end, (moecomm.Mismatch, moecomm.Timeout)) and one != other and mine and theirs:
            named = [any(word in str(end) for word in each) for each in (mine, theirs)]
            assert all(named), f"{one} on ranks 0 and 2, {other} on rank 1; rank {rank}: {end!r}"


def check_pairs(pairs: list[tuple[str, str]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(check_pair, pairs))


def test_a_rank_that_makes_another_call_ends_in_an_error_that_names_both() -> None:
    """Those that meet on the same boards, and one of each other kind."""
    check_pairs(
        [
            ("mask", "shrink"),
            ("shrink", "unmask"),
            ("shrink", "shrink, ids kept"),
            ("dispatch", "shrink"),
            ("unmask", "release"),
            ("release", "mask a rank"),
            ("grow", "unmask"),
            ("combine", "open"),
        ]
    )


def test_every_pair_of_calls_ends_in_an_error_that_names_both_and_a_second_try_works() -> None:
    check_pairs([(one, other) for one in ALL_CALLS for other in ALL_CALLS])
