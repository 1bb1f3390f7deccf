"""Random sequences of calls, some of which fail on some ranks: a named error everywhere, or the right result."""

from __future__ import annotations

import random
import threading
from collections import Counter
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
