"""The number of puts between domains: one for each run of consecutive tokens of a chunk, not one for each token."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.backends import host
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from .machine import Machine

RANKS, SIZE, EXPERTS, TOKENS = 4, 2, 8, 20
CHUNK = 8  # tokens
# By domain and token: two runs in the first chunk, none in the second, one that ends with the tokens; all but one.
WANTED = ("11100011" + "00000000" + "0011", "11111111" + "11111111" + "1101")
RUNS = (3, 4)  # by domain
PAIRS = {0: 1, 1: 2, 2: 1, 3: 2}  # ranks of a domain that a token goes to, by its number modulo 4


def routing(rank: int) -> torch.Tensor:
    """Expert ids [T, 4].  Rank r has the experts 2 r and 2 r + 1."""
    ids = torch.full((TOKENS, 4), -1)
    for token in range(TOKENS):
        for domain in range(RANKS // SIZE):
            if WANTED[domain][token] == "1":
                ids[token, 2 * domain] = 4 * domain + (rank + token) % 2
                if PAIRS[token % 4] == 2:
                    ids[token, 2 * domain + 1] = 4 * domain + 2
    return ids


def counted(machine: Machine, monkeypatch: pytest.MonkeyPatch, hidden: int, fp8: bool, layout: str) -> list[Any]:
    """Puts by sender and receiver, of a dispatch and of a combine, without those of the tagged words."""

    def run(args: Sequence[Any]) -> None:
        for one in args:
            one.chunk_tokens = CHUNK
        machine.run_all(args)

    def puts() -> torch.Tensor:
        return torch.tensor([[machine.puts(rank, peer) for peer in range(RANKS)] for rank in range(RANKS)])

    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=run))
    sizes = {"hidden": hidden, "num_experts": EXPERTS, "topk": 4, "max_tokens": TOKENS, "dtype": torch.bfloat16}
    found = []
    try:
        with LocalBuffers(RANKS, domain_ranks=SIZE, **sizes, backend="host") as ranks:
            shape = ranks.buffers[0].rounds.session.context.shape
            row = (hidden, hidden // 128 * 4) if fp8 else (2 * hidden, 0)
            token_bytes = _native.received_token_bytes(shape, *row)
            assert (shape.receive_bytes - token_bytes <= 1024) == (not fp8), "joins_tokens"
            calls = []
            for rank in range(RANKS):
                x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
                call = {"x": x, "topk_idx": routing(rank), "topk_weights": torch.ones(TOKENS, 4), "layout": layout}
                calls.append(call | ({"quantize": "fp8"} if fp8 else {}))
            before = puts()
            routed = ranks.dispatch(calls)
            found.append(puts() - before)
            ys = [here.x.bfloat16() if fp8 else here.x for here in routed]
            before = puts()
            ranks.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, routed, strict=True)])
            found.append(puts() - before)
    finally:
        machine.forget()
    words = torch.tensor([[int(rank // SIZE != peer // SIZE) for peer in range(RANKS)] for rank in range(RANKS)])
    return [(one - words).tolist() for one in found]


def by_forwarders(of_domain: tuple[int, int], back: bool) -> list[list[int]]:
    """Every rank puts to its counterpart alone, what its own domain or the other wants of a rank's tokens."""
    want = [[0] * RANKS for _ in range(RANKS)]
    for rank in range(RANKS):
        peer = (rank + SIZE) % RANKS
        want[rank][peer] = of_domain[(rank if back else peer) // SIZE]
    return want


@pytest.mark.parametrize("layout", ["flat", "expert"])
def test_a_run_of_tokens_is_one_put(layout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    dispatched, combined = counted(machine, monkeypatch, 64, False, layout)
    assert dispatched == by_forwarders(RUNS, back=False)
    assert combined == by_forwarders(RUNS, back=True)


def test_rows_much_smaller_than_their_places_go_one_by_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An FP8 dispatch has places with room for bfloat16; the sums of its combine fill theirs."""
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    dispatched, combined = counted(machine, monkeypatch, 2048, True, "flat")
    tokens = (WANTED[0].count("1"), WANTED[1].count("1"))
    assert tokens == (7, 19)
    assert dispatched == by_forwarders(tokens, back=False)
    assert combined == by_forwarders(RUNS, back=True)


def test_direct_rows_go_one_by_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One put for each (token, rank)."""
    dispatched, combined = counted(machine, monkeypatch, 64, False, "expert")
    experts = [routing(rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        for peer in range(RANKS):
            other = rank // SIZE != peer // SIZE
            rows = int((experts[rank] // 2 == peer).any(1).sum())
            assert rows > 0 and dispatched[rank][peer] == other * rows and combined[peer][rank] == other * rows
