"""Peers that fail become a row that says why, on every rank; DeepEP is called as its interface wants."""

from __future__ import annotations

import dataclasses
import types
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from moecomm_bench import deep_ep, peers
from moecomm_bench.clock import Timed
from moecomm_bench.ours import IN_WINDOW, OUTSIDE, Ours
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


class Chain:
    """A Clock, or a timer of single calls, that runs the calls of one replay, or of one capture."""

    found: ClassVar[list[int]] = []
    chain = 5

    def __init__(self, *given: Any, chain: int = 0, **more: Any) -> None:
        self._chain = chain

    def __call__(self, call: Any, *more: Any) -> list[float]:
        meet = more[0] if callable(more[0]) else None
        if meet is None:
            Chain.found.append(more[1])  # single calls are given the period
            return [1.0]
        meet()
        for _ in range(self._chain):
            call()
        return [1.0]

    def host_us(self, call: Any) -> float:
        return 1.0


def _calls_of_a_replay(rank: int, group: Any) -> list[int]:
    calls: list[int] = []
    case, device = dataclasses.replace(CASE, mode="graph"), torch.device("cpu")
    timed = Timed(
        {"what": "dispatch", "layout": "batched", "payload": "bf16", "sms": 0}, [partial(calls.append, 1)], period=2
    )
    with patch.object(peers, "Clock", Chain):
        measured = OtherLibraries(case, group, device, Chain())  # type: ignore[arg-type]
        times = measured._time(timed, types.SimpleNamespace(clock=Chain()))  # type: ignore[arg-type]
    assert set(times) == {"us", "host_us", "eager_us", "alone_us"}
    return [len(calls), *Chain.found]


def test_buffers_that_take_turns_are_called_by_whole_periods(ranks: Ranks) -> None:
    for found in ranks.run(2, _calls_of_a_replay):
        assert found == [2 * (2 + 6), 2], "twice two calls in which ranks meet, and a chain of 5 made even"


class Config:
    """DeepEP's Config: its chunk is kept, as it decides which is fastest here."""

    def __init__(self, sms: int, chunk: int, queue: int) -> None:
        self.sms, self.chunk, self.queue = sms, chunk, queue

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks * self.sms


class Buffer:
    """DeepEP's Buffer as far as it is called: keeps what it got."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    sms = 0
    get_low_latency_rdma_size_hint = staticmethod(lambda tokens, hidden, ranks, experts: tokens * hidden * experts)

    @classmethod
    def set_num_sms(cls, sms: int) -> None:
        cls.sms = sms

    @classmethod
    def get_dispatch_config(cls, ranks: int) -> Config:
        return Config(cls.sms, 99, 256)

    get_combine_config = get_dispatch_config

    def __init__(self, group: Any, nvl: int, rdma: int = 0, low_latency_mode: bool = False, **more: Any) -> None:
        self.calls.append(("open", nvl, rdma, low_latency_mode, more))

    def get_dispatch_layout(self, topk_idx: Any, experts: int) -> tuple[Any, ...]:
        return "to rank", None, "to expert", "is in rank", "event"

    def dispatch(self, x: Any, handle: Any = None, config: Any = None, **given: Any) -> tuple[Any, ...]:
        self.calls.append(("resend" if handle else "dispatch", x, config, given))
        return "rows", "ids", "weights", "counts", f"handle {config.sms}", "event"

    def combine(self, x: Any, handle: Any, config: Any) -> None:
        assert handle == f"handle {config.sms}", "SMs of the dispatch"
        self.calls.append(("combine", x, config))

    def get_local_buffer_tensor(self, dtype: Any, use_rdma_buffer: bool) -> torch.Tensor:
        assert use_rdma_buffer
        self.calls.append(("clear",))
        return torch.ones(4, dtype=dtype)

    def low_latency_dispatch(self, x: Any, ids: Any, most: int, experts: int, use_fp8: bool) -> tuple[Any, ...]:
        self.calls.append(("ll dispatch", most, experts, use_fp8))
        return torch.zeros(2), "counts", "handle", "event", None

    def low_latency_combine(self, x: Any, ids: Any, weights: Any, handle: Any) -> None:
        self.calls.append(("ll combine", x, handle))


class ElasticBuffer:
    """DeepEP's ElasticBuffer as far as it is called."""

    def __init__(self, group: Any, **given: Any) -> None:
        Buffer.calls.append(("open elastic", given))

    def get_theoretical_num_sms(self, experts: int, topk: int) -> int:
        return 64

    def dispatch(self, x: Any, num_sms: int, do_expand: bool, **given: Any) -> tuple[Any, ...]:
        assert given["do_cpu_sync"] is False and given["do_handle_copy"] is False
        assert given["num_max_tokens_per_rank"] == 6
        Buffer.calls.append(("elastic dispatch", num_sms, do_expand))
        return "rows", "ids", "weights", f"handle {do_expand}", "event"

    def combine(self, x: Any, handle: Any, num_sms: int) -> None:
        Buffer.calls.append(("elastic combine", num_sms, handle))


def _fastest(call: Any) -> float:
    """Microseconds of a call with a Config: the nearer its chunk is to 12, the fewer."""
    call()
    return float(abs(Buffer.calls[-1][2].chunk - 12) + 1)


def _plain(what: Any) -> Any:
    """Return what can leave the process: all but tensors."""
    if isinstance(what, dict):
        return {key: _plain(value) for key, value in what.items()}
    return tuple(map(_plain, what)) if isinstance(what, tuple) else "tensor" if torch.is_tensor(what) else what


def _deep_ep(rank: int, group: Any) -> list[Any]:
    module: Any = types.SimpleNamespace(Buffer=Buffer, ElasticBuffer=ElasticBuffer, Config=Config)
    abouts: list[Any] = []
    called: list[Any] = []
    case = dataclasses.replace(CASE, layouts=["flat", "expert"])
    with (
        patch.object(deep_ep, "nccl_group", lambda: group),
        patch.object(deep_ep, "_least_us", _fastest),
        Ours(case, group, torch.device("cpu"), 6) as ours,
        patch.object(ours, "sms", lambda op: 7),
    ):
        peer = deep_ep.DeepEP(case, module)
        for name, calls in peer.ways().items():
            for timed in calls(ours):
                assert len(timed.calls) == case.inputs
                Buffer.calls.append(("timed",))
                timed.calls[0]()
                called.append(Buffer.calls[-1])
                keys = ("what", "payload", "layout", "sms", "variant")
                abouts.append((name, *(timed.about[key] for key in keys), timed.graph, timed.by_expert, timed.period))
        cast, scales = next(call[1] for call in Buffer.calls if call[0] == "dispatch" and isinstance(call[1], tuple))
        back = (cast.float().view(6, -1, 128) * scales.unsqueeze(2)).view(6, -1)
        x = ours.inputs[0].x
        error = (back - x.float()).abs() / (x.float().abs() + scales.amax() * 2**-9)
        assert float(error.max()) <= 2**-4 and torch.equal(called[0][1], x)
    opened = [call[:4] for call in Buffer.calls if call[0] == "open"]
    return [abouts, [_plain(call) for call in called], opened]


@pytest.fixture
def deep_ep_found(ranks: Ranks) -> list[Any]:
    return ranks.run(2, _deep_ep)


def test_deep_ep_is_measured_like_for_like(deep_ep_found: list[Any]) -> None:
    flat = [("dispatch", "bf16", ""), ("dispatch", "fp8", "cast before"), ("combine", "", "")]
    waits = [("bf16", "", False), ("bf16", "no host wait", True)]
    waits += [("fp8", "cast before", False), ("fp8", "cast before, no host wait", True)]
    normal = [
        row
        for sms in (24, 8)
        for row in [
            *(("deep_ep", "dispatch", payload, "flat", sms, how, graph, False, 1) for payload, how, graph in waits),
            ("deep_ep", "combine", "", "flat", sms, "", True, False, 1),
        ]
    ]
    few = [("dispatch", "bf16"), ("dispatch", "fp8"), ("combine", "")]
    low_latency = [("deep_ep low-latency", *what, "batched", 0, "", True, True, 2) for what in few]
    elastic = [
        ("deep_ep elastic", what, payload, layout, sms, how, True, False, 1)
        for layout in ("flat", "expert")
        for part in ([(*flat[0][:2], "ids not copied"), (*flat[1][:2], "cast before, ids not copied")], flat[2:])
        for sms in (64, 24, 8)
        for what, payload, how in part
    ]
    for abouts, _, _ in deep_ep_found:
        assert abouts == [*normal, *low_latency, *elastic]


def test_deep_ep_has_the_sms_of_each_of_our_operations_in_its_layout() -> None:
    """A combine of rows in the window takes fewer blocks than one of rows outside, and `expert` more than `flat`."""
    sms = {("flat", ""): 64, ("flat", IN_WINDOW): 15, ("flat", OUTSIDE): 128}
    ours: Any = types.SimpleNamespace(sms=lambda op: sms.get((op.layout, op.variant), 96))
    case = dataclasses.replace(CASE, layouts=["flat", "expert"])
    assert deep_ep._sms(case, ours, "flat", 24) == [24, 64, 16, 128]
    assert deep_ep._sms(case, ours, "expert", 32, 24) == [32, 24, 96]


def test_deep_ep_is_called_as_its_interface_wants(deep_ep_found: list[Any]) -> None:
    for _, called, opened in deep_ep_found:
        nvl, rdma = 2 * CASE.hidden * 2 * 24, max(CASE.tokens) * CASE.hidden * CASE.experts
        assert opened == [("open", nvl, 0, False), ("open", 0, rdma, True)]
        normal, others = called[:10], called[10:]
        assert [call[0] for call in normal] == ["dispatch", "dispatch", "dispatch", "dispatch", "combine"] * 2
        chosen = [(call[2].sms, call[2].chunk, call[2].queue) for call in normal]
        assert chosen == [(24, 12, 256)] * 5 + [(8, 12, 256)] * 5
        assert [call[3]["num_worst_tokens"] for call in normal[:4]] == [0, 12, 0, 12]
        assert {call[3]["num_tokens_per_rank"] for call in normal[:4]} == {"to rank"}
        assert {call[3]["num_tokens_per_expert"] for call in normal[:4]} == {"to expert"}
        assert others[:2] == [("ll dispatch", 8, CASE.experts, fp8) for fp8 in (False, True)]  # 6 tokens, by fours
        assert others[2][0] == "ll combine" and others[2][2] == "handle"
        flat, expert = others[3:12], others[12:]
        for rows, expand in ((flat, False), (expert, True)):
            assert rows[:6] == [("elastic dispatch", sms, expand) for sms in (64, 24, 8) for _ in range(2)]
            assert rows[6:] == [("elastic combine", sms, f"handle {expand}") for sms in (64, 24, 8)]


def _sizes(rank: int, group: Any) -> list[Any]:
    case = dataclasses.replace(CASE, tokens=[600, 6, 9])
    found: list[Any] = []
    with patch.object(deep_ep, "nccl_group", lambda: group):
        peer = deep_ep.DeepEP(case, types.SimpleNamespace(Buffer=Buffer))  # type: ignore[arg-type]
        for tokens in case.tokens:
            Buffer.calls.clear()
            with Ours(case, group, torch.device("cpu"), tokens) as ours:
                count = len(peer.ways()["deep_ep low-latency"](ours))
            found.append((count, [call[:2] if call[0] == "ll dispatch" else call[:3] for call in Buffer.calls]))
    return found


def test_one_low_latency_buffer_serves_every_size_and_is_cleared_for_each(ranks: Ranks) -> None:
    for large, first, second in ranks.run(2, _sizes):
        assert large == (0, [])
        opened = ("open", 0, 12 * CASE.hidden * CASE.experts)
        assert first == (3, [opened, ("clear",), *[("ll dispatch", 8)] * CASE.inputs])
        assert second == (3, [("clear",), *[("ll dispatch", 12)] * CASE.inputs])


def test_a_trial_is_the_best_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 4.0, 3.0, 9.0, 8.0, 7.0])
    monkeypatch.setattr(deep_ep, "device_us", lambda call: (call(), next(times))[1])
    calls: list[int] = []
    assert deep_ep._least_us(lambda: calls.append(1)) == 3.0 / 8
    assert len(calls) == 1 + 3 * 8
