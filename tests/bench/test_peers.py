"""Peers that fail become a row that says why, on every rank; DeepEP is called as its interface wants."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar

import torch

from moecomm.bench import deep_ep
from moecomm.bench.clock import Timed
from moecomm.bench.ours import Ours
from moecomm.bench.peers import Peers

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
    peers = Peers(CASE, group, device)
    peers._ways = {"fails": fails, "cannot": cannot}
    found = []
    for tokens in (3, 4):
        with Ours(CASE, group, device, tokens) as ours:
            found += peers.rows(ours, lambda text: None)
    return [(row["who"], row["what"], row.get("why", "")) for row in found]


def test_one_that_fails_says_why_on_every_rank_and_is_not_asked_again(ranks: Ranks) -> None:
    want = [
        ("fails", "dispatch", ""),
        ("fails", "", "OSError: no such link"),
        ("cannot", "", "RuntimeError: too few experts"),
    ]
    assert ranks.run(2, _with_others) == [want, want]


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks


class Buffer:
    """DeepEP's Buffer as far as it is called: keeps what it got."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Config())
    set_num_sms = staticmethod(lambda sms: None)
    get_low_latency_rdma_size_hint = staticmethod(lambda tokens, hidden, ranks, experts: tokens * hidden * experts)

    def __init__(self, group: Any, nvl: int, rdma: int = 0, low_latency_mode: bool = False, **more: Any) -> None:
        self.calls.append(("open", nvl, rdma, low_latency_mode, more))

    def get_dispatch_layout(self, topk_idx: Any, experts: int) -> tuple[Any, ...]:
        return "to rank", None, "to expert", "is in rank", "event"

    def dispatch(self, x: Any, **given: Any) -> tuple[Any, ...]:
        self.calls.append(("dispatch", x, given))
        return "rows", "ids", "weights", "counts", "handle", "event"

    def combine(self, x: Any, handle: Any) -> None:
        self.calls.append(("combine", x, handle))

    def low_latency_dispatch(self, x: Any, ids: Any, most: int, experts: int, use_fp8: bool) -> tuple[Any, ...]:
        self.calls.append(("ll dispatch", most, experts, use_fp8))
        return torch.zeros(2), "counts", "handle", "event", None

    def low_latency_combine(self, x: Any, ids: Any, weights: Any, handle: Any) -> None:
        self.calls.append(("ll combine", x, handle))


def _deep_ep(rank: int, group: Any) -> tuple[list[str], list[Any], list[Any]]:
    deep_ep.module = lambda: types.SimpleNamespace(Buffer=Buffer)
    deep_ep.nccl_group = lambda: group
    device = torch.device("cpu")
    peer = deep_ep.DeepEP(CASE)
    abouts = []
    with Ours(CASE, group, device, 6) as ours:
        for calls in peer.ways().values():
            for timed in calls(ours):
                assert len(timed.calls) == CASE.inputs
                timed.calls[0]()
                abouts.append((*(timed.about[key] for key in ("what", "payload", "layout")), timed.graph))
        _, x, given = Buffer.calls[1]
        fine = [torch.equal(x, ours.inputs[0].x), given["num_tokens_per_rank"], given["num_tokens_per_expert"]]
        cast, scales = next(call[1] for call in Buffer.calls if call[0] == "dispatch" and isinstance(call[1], tuple))
        back = cast.float().view(6, -1, 128) * scales.unsqueeze(2)
        x = ours.inputs[0].x.float()
        error = (back.view(6, -1) - x).abs() / (x.abs() + scales.amax() * 2**-9)
        fine.append(float(error.max()) <= 2**-4)
    return list(peer.ways()), abouts, [fine, [call[0] for call in Buffer.calls]]


def test_deep_ep_is_called_as_its_interface_wants(ranks: Ranks) -> None:
    for ways, abouts, (fine, calls) in ranks.run(2, _deep_ep):
        assert ways == ["deep_ep", "deep_ep low-latency"]
        assert abouts == [
            ("dispatch", "bf16", "flat", False),
            ("dispatch", "fp8", "flat", False),
            ("combine", "", "flat", True),
            ("dispatch", "bf16", "batched", True),
            ("dispatch", "fp8", "batched", True),
            ("combine", "", "batched", True),
        ]
        assert fine == [True, "to rank", "to expert", True]
        assert calls == [
            *("open", *["dispatch"] * (CASE.inputs + 2), "combine"),
            *("open", *["ll dispatch"] * (CASE.inputs + 2), "ll combine"),
        ]
