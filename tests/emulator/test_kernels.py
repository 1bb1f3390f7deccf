"""Kernels on CPUs: against the reference, to the bit.  What crosses domains is put late and out of order."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import combine
from moecomm.backends import host
from moecomm.backends.lsa_kernels import dispatch_spec
from moecomm.base import packets
from moecomm.dispatch import reference as dispatch_reference
from moecomm.dispatch.tables import tables_of
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing import ranks as local
from moecomm.testing.cases import placed, random_placement, without_tokens
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

from ..combine import test_bias_first as bias_first
from ..combine.test_summed_grads import check_sums
from ..few import few
from ..wrap import rounds_since_wrap, wrap_after
from .machine import Call, Machine

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20, "dtype": torch.bfloat16}
UNEVEN: dict[str, Any] = {**SIZES, "num_experts": 10}  # of 4 ranks two have one more
DOMAINS = {"ranks": 4, "domain_ranks": 2}
CASES = 10
BEHIND = 1 << 16  # bytes that nobody may write


def random_cases(machine: Machine, monkeypatch: pytest.MonkeyPatch, direct: str, cases: int, hidden: int) -> None:
    """Rounds of CPU ranks by the machine; rows go straight to ranks of other domains, those of some do, or none."""
    sizes = {**UNEVEN, "hidden": hidden}
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    room = host.direct_bytes
    if direct != "all":
        monkeypatch.setattr(host, "direct_bytes", lambda *sizes: room(*sizes) // 256 * 64 * (direct == "some"))
    with LocalBuffers(**DOMAINS, **sizes, backend="host") as ranks:
        wrap_after(ranks, cases, kernels=True)
        try:
            for seed in range(cases):
                check_case(ranks, random_case(seed, ranks=DOMAINS["ranks"], **sizes, few_kernels=True))
            assert min(rounds_since_wrap(ranks)) >= 0
        finally:
            machine.forget()


def combines(machine: Machine, monkeypatch: pytest.MonkeyPatch, layout: str, sizes: dict[str, int]) -> None:
    """One after the other.  Ranks are rounds apart, and what is put or pulled from a place is still on its way when the
    next combine wants the place.
    """
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    if sizes != DOMAINS:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    with LocalBuffers(**sizes, **SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", sizes != DOMAINS)
        wrap_after(ranks, 4, kernels=True)
        routed = ranks.dispatch([tokens(rank, layout) for rank in range(len(ranks.buffers))])
        rows = [[here.x * 2.0**power for here in routed] for power in range(8)]  # which scales sums to the bit
        places = set()
        rounds, outs = [], []
        for ys in rows:
            pending = [
                prepare_combine(buffer, y=y, handle=here.handle)
                for buffer, y, here in zip(ranks.buffers, ys, routed, strict=True)
            ]
            places |= {p.args.reduced_rows for p in pending}
            rounds += [Call(p.args, machine.sizes) for p in pending]
            outs.append([combine.finish(buffer.rounds, p) for buffer, p in zip(ranks.buffers, pending, strict=True)])
        assert places == {0} if sizes == DOMAINS else len(places) == len(routed), "the same in every round"
        try:
            machine.run(rounds, len(routed))
        finally:
            machine.forget()
        ranks.check()
        assert all(bool(out.any()) for out in outs[0])
        for power, found in enumerate(outs):
            for out, first in zip(found, outs[0], strict=True):
                assert torch.equal(out.float(), first.float() * 2.0**power), f"combine {power}"


def tokens(rank: int, layout: str) -> dict[str, Any]:
    g, count = torch.Generator().manual_seed(rank), 5 + 5 * rank
    idx = torch.rand(count, 8, generator=g).argsort(dim=1)[:, :3]
    x, weights = torch.randn(count, 64, generator=g).bfloat16(), torch.rand(count, 3, generator=g)
    return {"x": x, "topk_idx": idx, "topk_weights": weights, "layout": layout}


@pytest.mark.parametrize(
    ("direct", "cases", "hidden"),
    few(
        # 2568 and 4096 columns: rows of several pieces, of which the last is shorter, or none
        [("some", 2, 64), ("none", 3, 2568), *((way, CASES, 64) for way in ("all", "some", "none")), ("none", 6, 4096)],
        ("some", 2, 64),
    ),
)
def test_random_cases_across_domains(
    direct: str, cases: int, hidden: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_cases(machine, monkeypatch, direct, cases, hidden)


@pytest.mark.parametrize("sizes", few([DOMAINS, {"ranks": 4}], {"ranks": 4}), ids=["domains", "heap"])
@pytest.mark.parametrize("layout", few(("expert", "flat"), "expert"))
def test_combines_one_after_the_other(
    layout: str, sizes: dict[str, int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    combines(machine, monkeypatch, layout, sizes)


@pytest.mark.parametrize(
    ("share", "in_ring", "cases"),
    few([(3, "13", 2), (1, "", CASES), (3, "13", CASES), (0, "", CASES), (0, "0123", CASES)], (3, "13", 2)),
)
def test_random_cases_in_one_domain(
    share: int, in_ring: str, cases: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all ranks go in packets, those of ranks with few tokens do, or none; rows that are reduced go through the
    ring of the ranks `in_ring`, and have a place each in the others.
    """
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(
        host, "packet_bytes", lambda ranks, most, row: packets.room(ranks, -(-most // share), row) if share else 0
    )
    with LocalBuffers(ranks=4, **UNEVEN, backend="host") as ranks:
        wrap_after(ranks, cases, kernels=True)
        for rank, buffer in enumerate(ranks.buffers):
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", str(rank) not in in_ring)
        try:
            for seed in range(cases):
                check_case(ranks, random_case(seed, ranks=4, **UNEVEN, few_kernels=True))
            assert min(rounds_since_wrap(ranks)) >= 0
        finally:
            machine.forget()


@pytest.mark.parametrize("sizes", few([DOMAINS, {"ranks": 4}], {"ranks": 4}), ids=["domains", "one"])
@pytest.mark.parametrize("packs", few((True, False), True))
@pytest.mark.parametrize(("slots", "lost"), [(4, 0), (1, 8)])
def test_placements(
    slots: int,
    lost: int,
    packs: bool,
    sizes: dict[str, int],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts anywhere, and elsewhere in the next round: rows in packets, and in bulk.  As many slots as experts and
    more, or fewer after a loss.
    """
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    if not packs:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    drawn: dict[str, Any] = {"ranks": 4, "num_experts": 10, "slots": slots, "lost": lost}
    with LocalBuffers(**sizes, **UNEVEN, backend="host", placement=random_placement(0, **drawn)) as ranks:
        try:
            for seed in range(6):
                check_case(ranks, placed(random_case(seed, ranks=4, **UNEVEN, few_kernels=True)))
                ranks.set_placement(random_placement(seed + 1, **drawn))
        finally:
            machine.forget()


@pytest.mark.parametrize("packs", few((True, False), True))
@pytest.mark.parametrize(("slots", "lost"), [(5, 0), (2, 3)])
def test_balanced_replicas(
    slots: int, lost: int, packs: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that a kernel chooses ahead of each dispatch, by one block to three.  More slots than experts, and fewer
    after a loss.
    """
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    if not packs:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    drawn: dict[str, Any] = {"ranks": 4, "num_experts": 10, "slots": slots, "balanced": True, "lost": lost}
    with LocalBuffers(ranks=4, **UNEVEN, backend="host", placement=random_placement(0, **drawn)) as ranks:
        try:
            for seed in range(6):
                check_case(ranks, placed(random_case(seed, ranks=4, **UNEVEN, few_kernels=True)))
                ranks.set_placement(random_placement(seed + 1, **drawn))
        finally:
            machine.forget()


@pytest.mark.parametrize("sizes", few([DOMAINS, {"ranks": 4}], {"ranks": 4}), ids=["domains", "one"])
@pytest.mark.parametrize("packs", few((True, False), True))
def test_ranks_without_experts_or_tokens(
    packs: bool, sizes: dict[str, int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens on two ranks and experts on the two others: no rank has both."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    if not packs:
        monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    apart = moecomm.Placement([[], [*range(5)], [], [*range(5, 10)]])
    with LocalBuffers(**sizes, **UNEVEN, backend="host", placement=apart) as ranks:
        try:
            for seed in range(6):
                case = placed(random_case(seed, ranks=4, **UNEVEN, few_kernels=True))
                check_case(ranks, without_tokens(case, (1, 3)))
        finally:
            machine.forget()


@pytest.mark.parametrize(("layout", "alignment"), few([("expert", 1), ("expert", 3), ("batched", 1)], ("expert", 3)))
def test_more_experts_than_lanes(
    layout: str, alignment: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane places several groups of a rank, the last of them fewer, or none."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    sizes: dict[str, Any] = {**SIZES, "ranks": 2, "num_experts": 141}
    plain: dict[str, Any] = {"layout": layout, "alignment": alignment, "begin": False, "again": False, "max_rows": None}
    plain |= {"quantize": None, "extras": [], "scale_format": "fp32", "scale_layout": "row", "scales": None}
    plain |= {"weight_grads": False, "own_weights": None}
    g = torch.Generator().manual_seed(1)
    x = [torch.randn(count, 64, generator=g).bfloat16() for count in (20, 13)]
    ids = [torch.rand(len(rows), 141, generator=g).argsort(dim=1)[:, :3].contiguous() for rows in x]
    weights: list[Any] = [torch.rand(len(rows), 3, generator=g) for rows in x]
    case = replace(random_case(0, **sizes, few_kernels=True), **plain, x=x, topk_idx=ids, topk_weights=weights)
    with LocalBuffers(**sizes, backend="host") as ranks:
        try:
            check_case(ranks, replace(case, bias=[None, None], workers=2))
        finally:
            machine.forget()


@pytest.mark.parametrize("layout", few(("expert", "flat"), "flat"))
def test_rows_of_several_pieces(layout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Combines of rows that lie elsewhere, the last piece not a whole one; all plain, so that few kernels are built."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    sizes = {**SIZES, "hidden": 1032}
    plain: dict[str, Any] = dict.fromkeys(("begin", "weight_grads", "in_window", "again"), False)
    plain |= dict.fromkeys(("quantize", "scales", "wire", "own_weights", "max_rows"))
    with LocalBuffers(ranks=2, **sizes, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", True)
        try:
            for seed in range(6):
                case = random_case(seed, ranks=2, **sizes, few_kernels=True, payloads=False)
                check_case(ranks, replace(case, layout=layout, alignment=1, weighted=True, **plain))
        finally:
            machine.forget()


@pytest.mark.parametrize("sizes", few([DOMAINS, {"ranks": 4}], {"ranks": 4}), ids=["domains", "packets"])
def test_a_handle_that_is_none(sizes: dict[str, int], machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank combines, or repeats, zeros or anything: all are told, nothing is addressed by it, and rounds go on."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    with LocalBuffers(**sizes, **SIZES, backend="host") as ranks:
        calls = [tokens(rank, "expert") for rank in range(4)]
        try:
            routed = ranks.dispatch(calls)
            ways: dict[str, list[dict[str, Any]]] = {
                "combine": [{"y": here.x, "handle": here.handle} for here in routed],
                "weights": [
                    {"y": here.x, "handle": here.handle, "topk_weights": given["topk_weights"]}
                    for here, given in zip(routed, calls, strict=True)
                ],
                "repeat": [{"x": given["x"], "handle": here.handle} for here, given in zip(routed, calls, strict=True)],
            }
            want = ranks.combine(ways["combine"])
            tables = tables_of(routed[1])
            intact = tables.clone()
            random = torch.randint(0, 256, tables.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
            for what in (torch.zeros_like(tables), random):
                for way, given in ways.items():
                    tables.copy_(what)
                    with pytest.raises(moecomm.BadInput, match=r"handle \(rank 1\)"):
                        (ranks.dispatch if way == "repeat" else ranks.combine)(given)
                    for buffer in ranks.buffers[1:]:
                        with pytest.raises(moecomm.BadInput, match=r"handle \(rank 1\)"):
                            buffer.check()
                    tables.copy_(intact)
                    assert all(map(torch.equal, ranks.combine(ways["combine"]), want)), way
        finally:
            machine.forget()


@pytest.mark.parametrize("way", ["packets", "direct", "forwarders"])
@pytest.mark.parametrize("wire", few([torch.float32, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize("layout", few(["expert", "batched"], "expert"))
def test_weights_of_the_source_ranks(
    layout: str, wire: torch.dtype, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combines one after the other, each with other weights, and now and then those of the dispatch.  Ranks are rounds
    apart.  Of few tokens in one domain, and over several, direct or through forwarders.
    """
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    if way == "forwarders":
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    sizes = {"ranks": 4} if way == "packets" else DOMAINS
    with (
        LocalBuffers(**sizes, **SIZES, backend="host") as ranks,
        LocalBuffers(**sizes, **SIZES, backend="host") as cpus,
    ):
        calls = [{**tokens(rank, layout), "layout": layout} for rank in range(4)]
        calls[1] = {**calls[1], **{name: calls[1][name][:0] for name in ("x", "topk_idx", "topk_weights")}}
        calls[2]["topk_idx"][::3, 1] = -1
        with monkeypatch.context() as here:  # signals of a kernel do not follow those of a Link
            here.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
            routed = ranks.dispatch(calls)
        given = [
            None if nth % 4 == 2 else [torch.randn(len(c["x"]), 3, generator=g) for c in calls]
            for nth, g in ((nth, torch.Generator().manual_seed(nth)) for nth in range(7))
        ]
        rounds, outs = [], []
        for weights in given:
            pending = [
                prepare_combine(b, here.x, here.handle, wire=wire, topk_weights=None if weights is None else weights[r])
                for r, (b, here) in enumerate(zip(ranks.buffers, routed, strict=True))
            ]
            rounds += [Call(p.args, machine.sizes) for p in pending]
            assert all(c.spec.own_weights == (weights is not None) for c in rounds[-4:])
            assert all(c.spec.packets == (way == "packets") for c in rounds[-4:])
            outs.append([combine.finish(b.rounds, p) for b, p in zip(ranks.buffers, pending, strict=True)])
        try:
            machine.run(rounds, 4)
        finally:
            machine.forget()
        ranks.check()
        for weights, found in zip(given, outs, strict=True):  # by the host executor
            carried = cpus.dispatch(
                [
                    {**c, "topk_weights": c["topk_weights"] if weights is None else weights[r]}
                    for r, c in enumerate(calls)
                ]
            )
            want = cpus.combine([{"y": c.x, "handle": c.handle, "wire": wire} for c in carried])
            for out, right in zip(found, want, strict=True):
                assert torch.equal(out, right)


@pytest.mark.parametrize(
    "way", few(["ring", "sums in the heap", "direct", "forwarders"], "sums in the heap", "forwarders")
)
def test_gradients_of_every_rank_are_added(way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "forwarders":
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    sizes = {"ranks": 4} if way in ("ring", "sums in the heap") else DOMAINS
    with LocalBuffers(**sizes, **SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", way == "sums in the heap")
        try:
            check_sums(ranks, machine.run_all, monkeypatch)
        finally:
            machine.forget()


@pytest.mark.parametrize("wide", few([False, True], False), ids=str)
@pytest.mark.parametrize(
    ("layout", "wire", "way"),
    [
        ("flat", None, "packets"),
        ("flat", None, "ring"),
        *few(
            [("expert", None, "sums in the heap"), ("expert", "exact", "packets"), ("expert", "exact", "ring")],
            ("expert", "exact", "packets"),
        ),
    ],
)
def test_the_sum_starts_from_the_bias(
    layout: str, wire: str | None, way: str, wide: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "packets":
        monkeypatch.setattr(host, "packet_bytes", packets.room)
    with LocalBuffers(bias_first.RANKS, **bias_first.SIZES, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", way == "sums in the heap")
        try:
            bias_first.check_bias_first(ranks, layout, wire, wide, machine.run_all, monkeypatch)
        finally:
            machine.forget()


@pytest.mark.parametrize("sizes", [{"ranks": 4}, DOMAINS], ids=["one domain", "domains"])
def test_ranks_that_differ_about_weights_are_told(
    sizes: dict[str, int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that gives no weights posts none: nobody waits for them."""
    monkeypatch.setattr(host, "packet_bytes", packets.room)
    with LocalBuffers(**sizes, **SIZES, backend="host", timeout_s=60) as ranks:
        calls = [{**tokens(rank, "expert"), "layout": "expert"} for rank in range(4)]
        monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
        routed = ranks.dispatch(calls)
        asked = [{"y": here.x, "handle": here.handle} for here in routed]
        asked[1]["topk_weights"] = calls[1]["topk_weights"]
        try:
            with pytest.raises(moecomm.Mismatch, match="topk_weights given"):
                ranks.combine(asked)
        finally:
            machine.forget()
        for buffer in ranks.buffers[1:]:
            with pytest.raises(moecomm.Mismatch, match="topk_weights given"):
                buffer.check()


@pytest.mark.parametrize("way", few(("packets", "ring", "domains"), "packets"))
@pytest.mark.parametrize("layout", few(("expert", "flat"), "expert"))
def test_ids_that_change_meanwhile_reach_no_other_memory(
    layout: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that were counted as those of one expert, or rank, are placed as those of another, which has no such rows."""
    monkeypatch.setattr(host, "packet_bytes", packets.room if way == "packets" else lambda *_: 0)
    sizes = DOMAINS if way == "domains" else {"ranks": 4}
    given = [torch.full((20, 3), -1) for _ in range(4)]
    states = [torch.full((20, 3), -1) for _ in range(2)]
    states[0][:, 0], states[1][:, 0] = 0, 1 if layout != "flat" else 2  # experts of one rank, or of two
    stop = threading.Event()

    def change() -> None:
        targets, views = [ids.numpy() for ids in given], [state.numpy() for state in states]
        while not stop.is_set():
            for view in views:
                for target in targets:
                    target[...] = view

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(8):
            with LocalBuffers(**sizes, **SIZES, backend="host") as ranks:
                for buffer in ranks.buffers:  # a round of which not all comes ends before the machine gives up
                    buffer.rounds.session.context.timeout_ns = 20_000_000
                routed = [
                    prepare_dispatch(b, torch.ones(20, 64).bfloat16(), ids, layout=layout, max_rows=80, sync=False)
                    for b, ids in zip(ranks.buffers, given, strict=True)
                ]
                behind = [b.rounds.memory.rows(BEHIND) for b in ranks.buffers]
                memory = [
                    (ctypes.c_uint8 * BEHIND).from_address(here.plan.base + block.offset)
                    for here, block in zip(routed, behind, strict=True)
                ]
                for found in memory:
                    ctypes.memset(found, 0x5A, BEHIND)
                machine.run_all([here.args for here in routed])
                assert all(bytes(found) == b"\x5a" * BEHIND for found in memory)
                del memory, behind, routed
    finally:
        stop.set()
        changing.join()
        machine.forget()


@pytest.mark.parametrize("way", ["packets", "ring", "domains"])
@pytest.mark.parametrize("op", few(["dispatch", "combine", "dispatch again"], "dispatch"))
def test_ranks_that_are_out_of_step_are_told(
    op: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that has failed on one rank alone ends the next round on all of them, whatever it is."""
    monkeypatch.setattr(host, "packet_bytes", packets.room if way == "packets" else lambda *_: 0)
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    sizes = DOMAINS if way == "domains" else {"ranks": 4}
    with LocalBuffers(**sizes, **SIZES, backend="host", timeout_s=60) as ranks:
        calls = [tokens(rank, "expert") for rank in range(4)]
        try:
            for buffer in ranks.buffers:
                with pytest.raises(moecomm.BadInput):
                    buffer.dispatch(torch.zeros(3))  # on all of them: nobody is out of step
            routed = ranks.dispatch(calls)
            with pytest.raises(moecomm.BadInput):
                ranks.buffers[2].combine(torch.zeros(3), routed[2].handle)
            run, given = {
                "dispatch": (ranks.dispatch, calls),
                "combine": (ranks.combine, [{"y": here.x, "handle": here.handle} for here in routed]),
                "dispatch again": (
                    ranks.dispatch,
                    [{"x": c["x"], "handle": here.handle} for c, here in zip(calls, routed, strict=True)],
                ),
            }[op]
            with pytest.raises(moecomm.OutOfStep) as raised:
                run(given)
        finally:
            machine.forget()
        assert (raised.value.mine, raised.value.theirs, raised.value.rank) == (1, 2, 2)
        for buffer in ranks.buffers:
            with pytest.raises(moecomm.OutOfStep):
                buffer.check()


@pytest.mark.parametrize("way", few(["packets", "sums in the heap", "ring", "domains"], "sums in the heap", "ring"))
@pytest.mark.parametrize("layout", few(("expert", "flat"), "flat"))
def test_ranks_with_handles_of_different_dispatches_are_told(
    layout: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In combines and repeats; and a dispatch that runs again, as a graph does, makes its handle one of that round."""
    monkeypatch.setattr(host, "packet_bytes", packets.room if way == "packets" else lambda *_: 0)
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    sizes = DOMAINS if way == "domains" else {"ranks": 4}
    with LocalBuffers(**sizes, **SIZES, backend="host", timeout_s=60) as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", way == "sums in the heap")
        calls = [tokens(rank, layout) for rank in range(4)]
        for c in calls:
            c["topk_idx"] = c["topk_idx"].contiguous()  # where the dispatch finds it again
        first, second = (ranks.dispatch(calls) for _ in range(2))
        void = [prepare_dispatch(b, **c, max_rows=1, sync=False) for b, c in zip(ranks.buffers, calls, strict=True)]
        machine.run_all([here.args for here in void])  # without its end, which raises
        for buffer in ranks.buffers:
            with pytest.raises(moecomm.BadInput, match="max_rows"):
                buffer.check()
        rows = [here.x for here in first]
        try:
            want = ranks.combine([{"y": y, "handle": here.handle} for y, here in zip(rows, first, strict=True)])
            for number, other in ((1, first), (3, void)):
                mixed = [(other if rank == 2 else second)[rank].handle for rank in range(4)]
                ys = [torch.ones(handle.y_shape, dtype=torch.bfloat16) for handle in mixed]
                asked = [{"y": y, "handle": handle} for y, handle in zip(ys, mixed, strict=True)]
                again = [{"x": c["x"], "handle": handle} for c, handle in zip(calls, mixed, strict=True)]
                named = f"that of the dispatch of round {number}[,;]"
                for run, given in ((ranks.combine, asked), (ranks.dispatch, again)):
                    with pytest.raises(moecomm.Mismatch, match=named) as raised:
                        run(given)
                    assert (raised.value.field, raised.value.rank) == ("handle", 2)
                    for rank, buffer in enumerate(ranks.buffers[1:], start=1):
                        with pytest.raises(moecomm.Mismatch, match=named) as raised:
                            buffer.check()
                        assert (raised.value.field, raised.value.rank) == ("handle", 0 if rank == 2 else 2)
                    for buffer in ranks.buffers:  # as if the ranks had agreed where they are
                        buffer.rounds.recovered()
            machine.run_all([here.args for here in second])
            good = [{"y": y, "handle": here.handle} for y, here in zip(rows, second, strict=True)]
            assert all(torch.equal(out, right) for out, right in zip(ranks.combine(good), want, strict=True))
        finally:
            machine.forget()
        ranks.check()


@pytest.mark.long
def test_rows_not_in_use_of_few_tokens_and_of_many(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One domain: of few tokens, which go in packets, of more, and a round that is void."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    for small, room in ((True, packets.room), (False, lambda *sizes: 0)):
        monkeypatch.setattr(host, "packet_bytes", room)
        with LocalBuffers(ranks=2, **SIZES, backend="host") as ranks:
            calls = [{**tokens(rank, "flat"), "max_rows": 30, "sync": False} for rank in range(2)]
            assert all(
                dispatch_spec(prepare_dispatch(b, **c).args).packets == small
                for b, c in zip(ranks.buffers, calls, strict=True)
            )
            routed = ranks.dispatch(calls)
            wanted = dispatch_reference.dispatch(
                *([call[name] for call in calls] for name in ("x", "topk_idx", "topk_weights")),
                num_experts=8,
                layout="flat",
            )
            for here, want in zip(routed, wanted, strict=True):
                assert 0 < here.num_rows.item() == want.num_rows < 30
                idx, weights = dispatch_reference.unused(want, 30)
                assert torch.equal(here.topk_idx, idx) and torch.equal(here.topk_weights, weights)
            void = [
                prepare_dispatch(b, **{**call, "max_rows": 7}) for b, call in zip(ranks.buffers, calls, strict=True)
            ]
            machine.run_all([here.args for here in void])  # without its end, which raises
            with pytest.raises(moecomm.BadInput, match="max_rows"):
                ranks.check()
            for here in void:
                assert here.num_rows.item() == 0 and bool((here.topk_idx == -1).all())
                assert not here.topk_weights.any()
