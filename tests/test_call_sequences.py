"""Random sequences of calls, some of which fail on some ranks: a named error everywhere, or the right result."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import moecomm
from moecomm import ops

from .few import few

RANKS, HIDDEN, EXPERTS, TOPK, MOST = 4, 64, 8, 3, 12
CALLS, SEQUENCES = 12, 40
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": MOST}


class Inputs:
    """One rank's tokens of one call.  The first columns of a row say which token of which rank and call it is."""

    def __init__(self, seed: int, call: int, rank: int) -> None:
        g = torch.Generator().manual_seed((seed * CALLS + call) * RANKS + rank)
        tokens = int(torch.randint(0, MOST + 1, (), generator=g))
        self.x = torch.zeros(tokens, HIDDEN)
        self.x[:, 0], self.x[:, 1], self.x[:, 2] = call + 1, rank + 1, torch.arange(1, tokens + 1)
        self.x = self.x.bfloat16()
        self.ids = torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()


class Program:
    """The calls of one rank, each the same kind as those of its peers, and a check of each result."""

    def __init__(self, seed: int, rank: int, buffer: moecomm.Buffer, fails: random.Random) -> None:
        self._seed, self._rank, self._buffer, self._fails = seed, rank, buffer, fails
        self._routed: moecomm.Routed | None = None
        self._made: Inputs | None = None  # what the last dispatch has sent
        g = torch.Generator().manual_seed(seed)
        self._w13 = (torch.randn(EXPERTS, 32, HIDDEN, generator=g) / 8).bfloat16()
        self._w2 = (torch.randn(EXPERTS, HIDDEN, 16, generator=g) / 8).bfloat16()
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        kinds = random.Random(self._seed)
        for call in range(CALLS):
            kind = kinds.choice([self.dispatch, self.combine, self.halves, self.repeat, self.moe, self.operators])
            try:
                kind(call, self._bad())
                self.seen["right"] += 1
            except moecomm.MoecommError as error:
                self.seen[type(error).__name__] += 1

    def _bad(self) -> str:
        """Mostly nothing; else what makes a call fail on this rank."""
        return self._fails.choice(["dtype", "tokens"]) if self._fails.random() < 0.03 else ""

    def _x(self, mine: Inputs, bad: str) -> torch.Tensor:
        if bad == "dtype":
            return mine.x.double()
        return torch.zeros(MOST + 1, HIDDEN).bfloat16() if bad == "tokens" else mine.x

    def _check_rows(self, call: int, rows: torch.Tensor) -> None:
        """Exactly the rows that all ranks have sent in this call."""
        local = EXPERTS // RANKS
        want = []
        for expert in range(self._rank * local, (self._rank + 1) * local):
            for rank in range(RANKS):
                sent = Inputs(self._seed, call, rank)
                want.append(sent.x[(sent.ids == expert).any(dim=1)])
        assert torch.equal(rows, torch.cat(want)), (call, self._rank)

    def dispatch(self, call: int, bad: str) -> None:
        self._routed = None
        mine = Inputs(self._seed, call, self._rank)
        routed = self._buffer.dispatch(self._x(mine, bad), mine.ids)
        self._check_rows(call, routed.x)
        self._routed, self._made = routed, mine

    def halves(self, call: int, bad: str) -> None:
        self._routed = None
        mine = Inputs(self._seed, call, self._rank)
        routed = self._buffer.dispatch_begin(self._x(mine, bad), mine.ids)
        self._buffer.dispatch_end(routed)
        self._check_rows(call, routed.x)
        self._routed, self._made = routed, mine

    def combine(self, call: int, bad: str) -> None:
        if self._routed is None:
            return self.dispatch(call, bad)
        made, rows = self._made, self._routed.x
        assert made is not None
        out = self._buffer.combine(rows[:, :-8] if bad else rows, self._routed.handle)
        assert torch.equal(out, TOPK * made.x), (call, self._rank)
        return None

    def repeat(self, call: int, bad: str) -> None:
        """With the rows of the dispatch before, doubled."""
        if self._routed is None:
            return self.dispatch(call, bad)
        assert self._made is not None
        x = 2 * self._made.x
        again = self._buffer.dispatch(x.double() if bad else x, handle=self._routed.handle)
        assert torch.equal(again.x, 2 * self._routed.x), (call, self._rank)
        return None

    def moe(self, call: int, bad: str) -> None:
        mine, local = Inputs(self._seed, call, self._rank), EXPERTS // RANKS
        here = slice(self._rank * local, (self._rank + 1) * local)
        w13 = self._w13[here, :, :-16] if bad else self._w13[here]
        out = self._buffer.moe(mine.x, mine.ids, None, w13.contiguous(), self._w2[here])
        want = torch.zeros(mine.x.shape)
        for k in range(TOPK):
            gate, up = torch.einsum("th,tih->ti", mine.x.float(), self._w13[mine.ids[:, k]].float()).chunk(2, dim=1)
            want += torch.einsum("ti,thi->th", F.silu(gate) * up, self._w2[mine.ids[:, k]].float())
        torch.testing.assert_close(
            out.float(), want, rtol=0.03, atol=0.03 * (1 + want.abs().max().item()) if len(want) else 1
        )

    def operators(self, call: int, bad: str) -> None:
        mine = Inputs(self._seed, call, self._rank)
        x = mine.x.clone().requires_grad_()
        # In the words that these operators check themselves, and that the Buffer does.
        wrong = {"dtype": {"max_rows": -2}, "tokens": {"layout": "rows"}}.get(bad, {})
        routed = ops.dispatch(self._buffer, x, mine.ids, **{"max_rows": RANKS * MOST * TOPK, **wrong})
        late = self._bad()
        handle = routed.handle._replace(max_rows=7) if late == "dtype" else routed.handle
        out = ops.combine("rows" if late == "tokens" else routed.x, handle)  # type: ignore[arg-type]
        assert torch.equal(out, TOPK * mine.x), (call, self._rank)
        out.backward(mine.x)
        assert x.grad is not None and torch.equal(x.grad, TOPK * mine.x), (call, self._rank)


def run_sequence(seed: int, domain_ranks: int) -> list[Counter[str]]:
    seen: list[Any] = [None] * RANKS

    def run(rank: int, group: Any) -> None:
        fails = random.Random(seed * RANKS + rank)
        try:
            with moecomm.Buffer(group, **SIZES, backend="host", domain_ranks=domain_ranks, timeout_s=60) as buffer:
                program = Program(seed, rank, buffer, fails)
                program.run()
                seen[rank] = program.seen
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            seen[rank] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(moecomm.local_ranks(RANKS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in seen:
        if isinstance(each, BaseException):
            raise each
    return seen


@pytest.mark.parametrize("domain_ranks", few((RANKS, 2), 2))
def test_no_wrong_result_and_no_hang(domain_ranks: int) -> None:
    every: Counter[str] = Counter()
    for seed in range(SEQUENCES):
        seen = run_sequence(seed, domain_ranks)
        for of_rank in seen:
            every += of_rank
        if any(of_rank["BadInput"] for of_rank in seen):  # then nobody ends as if nothing had happened
            assert all(of_rank.keys() - {"right"} for of_rank in seen), seen
    assert every["right"] > 200 and every["BadInput"] > 20 and every["OutOfStep"] > 200, every
    assert every.keys() <= {"right", "BadInput", "OutOfStep", "PeerLost"}, every


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
