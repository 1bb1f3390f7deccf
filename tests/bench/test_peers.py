"""Peers that fail become a row that says why, on every rank; DeepEP is called as its interface wants."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moecomm_bench.clock import Timed
from moecomm_bench.ours import Ours
from moecomm_bench.peers import OtherLibraries

from ..conftest import Ranks
from .test_case import CASE as SIZES

CASE = dataclasses.replace(SIZES, ranks=2, replays=2, payloads=["bf16", "fp8"], ceiling=False)


def _nothing() -> None:
    pass


def _with_others(rank: int, group: Any) -> list[tuple[str, str, str]]:
    """(who, what, why) of all rows at two sizes, with one that fails on rank 1 and one that can't even start."""

    def fails(ours: Ours) -> list[Timed]:
        def call() -> None:
            if rank == 1:
                raise OSError("no such link\nin line 7")

        about = {"layout": "flat", "payload": "bf16", "sms": 8}
        works = Timed({"what": "dispatch", **about}, [_nothing] * 2)
        return [works, Timed({"what": "combine", **about}, [call]), Timed({"what": "never", **about}, [call])]

    def cannot(ours: Ours) -> list[Timed]:
        raise RuntimeError("too few experts" if rank == 0 else "")

    device = torch.device("cpu")
    found_peers = OtherLibraries(CASE, group, device)
    found_peers._ways = {"fails": fails, "cannot": cannot}
    found = []
    for tokens in (3, 4):
        with Ours(CASE, group, device, tokens) as ours:
            found += found_peers.rows(ours, lambda text: None)
    return [(row["who"], row["what"], row.get("why", "")) for row in found]


def test_one_that_fails_says_why_on_every_rank_and_is_not_asked_again(ranks: Ranks) -> None:
    want = [
        ("fails", "dispatch", ""),
        ("fails", "", "OSError: no such link"),
        ("cannot", "", "RuntimeError: too few experts"),
    ]
    assert ranks.run(2, _with_others) == [want, want]
