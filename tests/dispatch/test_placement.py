"""Placements: experts anywhere, replicas, and their change while a Buffer is open."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

import moecomm
from moecomm import Placement, balance, nn, ops
from moecomm.base import replicas
from moecomm.base.choices import Layout, ReplicaChoice
from moecomm.dispatch.routed import ChunkedHandle
from moecomm.errors import BadInput, Mismatch, PeerLost, Unsupported
from moecomm.testing import LocalBuffers, check_case, random_case, random_sizes
from moecomm.testing.cases import placed, random_placement
from moecomm.testing.check import Wanted, again_call, dispatch_call
from moecomm.testing.layers import selecting

from ..backends.conftest import run_ranks
from ..few import few
from ..ops.plain import formula
from ..placed_rounds import SIZES as ROUND_SIZES
from ..placed_rounds import check_random, check_rank, check_sums, left, routing, wanted

HELD = [[2, 0], [1, 2], [3, 2], []]  # of 4 ranks; expert 2 has three replicas, and rank 3 has no expert
SIZES: dict[str, Any] = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 12, "timeout_s": 20}


def tokens(rank: int, count: int = 12, experts: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(count, experts, generator=g).argsort(dim=1)[:, :2].contiguous()
    return torch.randn(count, 16, generator=g).bfloat16(), ids, torch.rand(count, 2, generator=g)


@pytest.mark.parametrize("number", few(range(40), 3))
def test_rounds_match_the_reference(number: int) -> None:
    """All layouts, options and payloads, one domain and two, and a placement that changes between rounds."""
    sizes = random_sizes(number)
    domains = {"domain_ranks": sizes["ranks"] // 2} if sizes["ranks"] % 2 == 0 and number % 3 == 0 else {}
    balanced = not domains and number % 2 == 0
    drawn = partial(random_placement, **sizes, balanced=balanced, lost=number % 5 % 3)
    first = drawn(number)
    with LocalBuffers(**sizes, **domains, backend="host", verify_every=number % 3, placement=first) as ranks:
        for seed in range(number * 10, number * 10 + 10):
            if seed % 3 == 2:
                ranks.set_placement(drawn(seed, slots=first.slots))
            check_case(ranks, placed(random_case(seed, **sizes)))


@pytest.mark.parametrize("seed", few(range(200), *range(8)))
def test_slots_after_losses_moves_and_masks(seed: int) -> None:
    """Slots, experts that callers name and ids are three numbers: any may be more than the others."""
    check_random(seed)


@pytest.mark.parametrize("choice", ["token", "balanced"])
def test_a_loss_and_growth(choice: ReplicaChoice) -> None:
    """Experts 2 and 3 go with rank 1: entries of the others lose no row.  Then new ranks have all experts."""
    before = Placement([[0, 1], [2, 3], [4, 5]], choice=choice)
    after, grown = left(before, 1), Placement([[5, 0], [3, 1], [4, 2]], choice=choice)
    two, three = moecomm.local_ranks(2), moecomm.local_ranks(3)

    def body(group: Any) -> None:
        def check(buffer: moecomm.Buffer, placement: Placement, seed: int) -> None:
            slots, ids = wanted(seed, placement), routing(seed, buffer.rank, 6)
            routed = buffer.dispatch(torch.ones(len(ids), 16), ids)
            y = check_rank(slots, buffer.rank, 2, routed.tokens_per_expert)
            check_sums(slots[buffer.rank], buffer.combine(y, routed.handle))

        with moecomm.Buffer(group, num_experts=6, **ROUND_SIZES, placement=before) as buffer:
            if group.rank != 1:
                buffer.shrink(two[group.rank // 2])
                for seed in range(30):
                    check(buffer, after, seed)
                buffer.grow(three[buffer.rank], placement=grown)
                for seed in range(10):
                    check(buffer, grown, seed)
                return
        with moecomm.Buffer(three[2], num_experts=6, **ROUND_SIZES, placement=grown) as buffer:
            for seed in range(10):
                check(buffer, grown, seed)

    assert run_ranks(3, body) == [None] * 3


@pytest.mark.parametrize("call", ["close", "combine"])
def test_a_choice_that_does_not_end_is_not_judged(call: str) -> None:
    """After a bad id that all ranks caught, a peer that closes or makes another call is named, and no good id."""
    placement = Placement([[0, 1, 3], [2, 3, 0]], choice="balanced")
    good = torch.tensor([[0, 1], [2, 3], [1, 3], [2, 0]])
    bad = good.clone()
    bad[:, 0] = -2
    error = PeerLost if call == "close" else Mismatch

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, placement=placement) as buffer:
            x = torch.zeros(4, 16).bfloat16()
            first = buffer.dispatch(x, good)
            with pytest.raises(BadInput, match="-2"):
                buffer.dispatch(x, bad if group.rank == 0 else good)
            if group.rank == 0:
                with pytest.raises(error):
                    buffer.dispatch(x, good)
            elif call == "combine":
                with pytest.raises(Mismatch):
                    buffer.combine(first.x, first.handle)

    assert run_ranks(2, body) == [None] * 2


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
@pytest.mark.parametrize("choice", ["token", "nearest"])
def test_tokens_in_parts_go_on_taking_turns(choice: ReplicaChoice, layout: Layout) -> None:
    """A call that goes in several rounds takes the replicas of one round, in rounds, layers and operators."""
    placement = Placement([[0, 1], [1, 2], [2, 0], [2, 1]], choice=choice)
    sizes = {**SIZES, "num_experts": 3, "max_tokens": 21}

    def body(group: Any) -> None:
        x, ids, weights = tokens(group.rank, 21, 3)
        want = sum(
            torch.bincount(placement.slots_of(tokens(rank, 21, 3)[1], rank).flatten(), minlength=8) for rank in range(4)
        )
        found = []
        for room in (10.0, 0.3):
            with moecomm.Buffer(group, **sizes, capacity_factor=room, placement=placement) as buffer:
                g = torch.Generator().manual_seed(7)
                w13, w2 = (selecting(2, *shape, generator=g, dtype=torch.bfloat16) for shape in ((8, 16), (16, 4)))
                routed = buffer.dispatch(x, ids, weights, layout=layout)
                assert torch.equal(routed.tokens_per_expert.long(), want.view(4, 2)[group.rank])
                assert isinstance(routed.handle, ChunkedHandle) == (room < 1)
                outs = [buffer.combine(routed.x * 3, routed.handle)]
                again = ops.dispatch(buffer, x, ids, weights, layout=layout)
                assert torch.equal(again.tokens_per_expert, routed.tokens_per_expert)
                outs.append(ops.combine(again.x * 3, again.handle))
                before = buffer.stats().rows_per_expert
                outs.append(buffer.moe(x, ids, weights, w13, w2))
                assert torch.equal(buffer.stats().rows_per_expert - before, want.view(4, 2)[group.rank])
                tracked = x.clone().requires_grad_()
                ops.moe(buffer, tracked, ids, weights, w13, w2).float().sum().backward()
                found.append([*outs, tracked.grad])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)

    assert run_ranks(4, body) == [None] * 4


def test_a_placement_does_not_change() -> None:
    placement = Placement(HELD)
    with moecomm.Buffer("self", **SIZES, placement=Placement([range(4)])) as buffer:
        buffer.placement.experts[:] = 0  # type: ignore[union-attr]
        assert buffer.local_experts == (0, 1, 2, 3) and buffer.placement == Placement([range(4)])
    assert placement.held == ((2, 0), (1, 2), (3, 2), (-1, -1))
    for name in ("experts", "held", "choice", "slots"):
        with pytest.raises(AttributeError):
            setattr(placement, name, None)
    assert copy.deepcopy(placement) == copy.copy(placement) == placement


@pytest.mark.parametrize(
    "experts",
    [
        [range(10**7)],
        [itertools.count()],
        itertools.repeat([0]),
        torch.zeros(1, 10**6, dtype=torch.int64),
        torch.zeros(10**6, 0, dtype=torch.int64),
    ],
)
def test_too_many_slots_are_refused_at_once(experts: Any) -> None:
    begin = time.process_time()
    with pytest.raises(BadInput, match="slots"):
        Placement(experts)
    assert time.process_time() - begin < 2


def test_an_expert_has_fewer_than_4096_replicas() -> None:
    placement = Placement([[0] * 4095], choice="token")
    sizes = {**SIZES, "num_experts": 1, "topk": 1, "max_tokens": 4096}
    with moecomm.Buffer("self", **sizes, placement=placement) as buffer:
        routed = buffer.dispatch(torch.zeros(4096, 16).bfloat16(), torch.zeros(4096, 1, dtype=torch.int64))
        assert routed.tokens_per_expert.tolist() == [2, *[1] * 4094]  # the last token takes the first replica again
    with pytest.raises(BadInput, match="experts: got 4096 slots of one expert; want fewer than 4096"):
        Placement([[0] * 4096])


@pytest.mark.parametrize("choice", ["token", "nearest"])
def test_replicas_take_turns(choice: ReplicaChoice) -> None:
    """By the number of the token plus k; "nearest" where the token is, if there is one."""
    placement = Placement(HELD, choice=choice)
    assert placement.slots == 2 and placement.experts[3].tolist() == [-1, -1]
    assert placement.log2phy.tolist() == [[1, -1, -1], [2, -1, -1], [0, 3, 5], [4, -1, -1]]
    assert placement.logcnt.tolist() == [1, 1, 3, 1]
    rows = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])  # by slot
    assert placement.by_expert(rows).tolist() == [2, 4, 1 + 8 + 32, 16]
    ids = torch.tensor([[2, 0], [-1, 2], [2, 2], [4, 3]])
    slots = {rank: placement.slots_of(ids, rank, 2).tolist() for rank in (1, 3)}
    if choice == "token":  # turns 0, 2, 2, 3
        assert slots[1] == slots[3] == [[0, 1], [-1, 5], [5, 0], [8, 4]]
    else:
        assert slots == {1: [[3, 1], [-1, 3], [3, 3], [8, 4]], 3: [[5, 1], [-1, 5], [5, 5], [8, 4]]}
    assert Placement.of_plan(placement.experts.flatten(), 4, choice=choice) == placement


def test_balanced_replicas_take_what_others_leave() -> None:
    """Expert 2 has 12 entries, and its ranks 4, 1 and 3 of others, which become 7, 7 and 6."""
    placement = Placement(HELD, choice="balanced")
    counts = torch.tensor([[2, 0, 3, 1], [2, 1, 0, 0], [0, 0, 5, 2], [0, 0, 4, 0]])  # of each rank, by expert
    slots = {}
    for rank, row in enumerate(counts.tolist()):
        ids = torch.tensor([expert for expert, count in enumerate(row) for _ in range(count)])[:, None]
        found = placement.slots_of(ids, rank, counts=counts).flatten()
        slots[rank] = found[ids.flatten() == 2].tolist()
    # Ranks 0 and 2 keep 3 of their own each; slot 3 of rank 1, which sends none, gets the rest.
    assert slots == {0: [0, 0, 0], 1: [], 2: [5, 5, 5, 3, 3], 3: [3, 3, 3, 3]}
    with pytest.raises(BadInput, match="counts"):
        placement.slots_of(torch.tensor([[2]]), 0)


@given(
    entries=strategies.integers(0, 60),
    loads=strategies.lists(strategies.integers(0, 40), min_size=1, max_size=4),
)
def test_entries_are_poured_like_water(entries: int, loads: list[int]) -> None:
    """One by one, each to the least load, the first of equal ones, gives the same sums."""
    sums = list(loads)
    for _ in range(entries):
        sums[sums.index(min(sums))] += 1
    found = replicas.pour(entries, loads)
    assert sorted(load + share for load, share in zip(loads, found, strict=True)) == sorted(sums)
    assert sum(found) == entries and min(found) >= 0


def test_balanced_ranks_have_equally_many_rows() -> None:
    """One expert has half of all entries; by turns its ranks would have more than the others."""
    placement = Placement([[0, 1], [0, 2], [3, 4, 0], [5, 0]], choice="balanced")

    def body(group: Any) -> list[int]:
        x, ids = tokens(group.rank)[0], torch.stack([torch.zeros(12, dtype=torch.int64), torch.arange(12) % 5 + 1], 1)
        with moecomm.Buffer(group, **{**SIZES, "num_experts": 6}, backend="host", placement=placement) as buffer:
            return [int(buffer.dispatch(x[:n], ids[:n]).tokens_per_expert.sum()) for n in (12, 0, 12)]

    assert run_ranks(4, body) == [[24, 0, 24]] * 4


def test_balanced_rounds_are_predicted() -> None:
    """The loads that a plan predicts for the tokens of a round are the rows of its ranks."""
    load = torch.tensor([9, 1, 7, 3, 2, 2])  # entries of each expert
    made = balance.plan(load[None], ranks=3, slots=8)
    ids = torch.arange(6).repeat_interleave(load).view(3, -1, 2)

    def body(group: Any) -> int:
        sizes = {**SIZES, "num_experts": 6}
        with moecomm.Buffer(group, **sizes, backend="host", placement=made.placement(choice="balanced")) as buffer:
            x = torch.ones(len(ids[group.rank]), 16).bfloat16()
            return int(buffer.dispatch(x, ids[group.rank]).tokens_per_expert.sum())

    assert run_ranks(3, body) == made.rank_loads(load, "balanced")[0].round().long().tolist()
    with pytest.raises(BadInput, match="choice"):
        made.predicted(load, "token")  # type: ignore[arg-type]


def test_what_balanced_replicas_refuse() -> None:
    def body(group: Any) -> None:
        x, ids, weights = tokens(group.rank)
        first = Placement(HELD, choice="balanced")
        with pytest.raises(Unsupported, match="several domains"):
            moecomm.Buffer(group, **SIZES, backend="host", placement=first, domain_ranks=2)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=first, capacity_factor=0.5) as buffer:
            with pytest.raises(BadInput, match="choice='balanced'"):
                buffer.set_placement(Placement(HELD, choice="token"))
            with pytest.raises(Unsupported, match="drop"):
                buffer.dispatch(x, ids, weights, overflow="drop")
            buffer.set_placement(Placement([[], [3, 1], [0, 2], [2, 2]], choice="balanced"))
            assert int(buffer.dispatch(x, ids, weights, layout="expert").tokens_per_expert.sum()) >= 0
        other = moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD))
        with other, pytest.raises(BadInput, match="choice='nearest'"):
            other.set_placement(first)

    assert run_ranks(4, body) == [None] * 4


@pytest.mark.parametrize("call", ["combine", "repeat", "layout"])
def test_a_rank_with_another_call_ends_the_wait_for_counts(call: str) -> None:
    """Rank 2 sends no counts, or others: all ranks raise Mismatch at once."""

    def body(group: Any) -> float:
        x, ids, weights = tokens(group.rank)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD, choice="balanced")) as buffer:
            routed = buffer.dispatch(x, ids, weights)
            calls = {
                "combine": partial(buffer.combine, routed.x, routed.handle),
                "repeat": partial(buffer.dispatch, x, handle=routed.handle),
                "layout": partial(buffer.dispatch, x, ids, weights, layout="flat"),
            }
            begin = time.perf_counter()
            with pytest.raises(Mismatch):
                calls[call]() if group.rank == 2 else buffer.dispatch(x, ids, weights)
            return time.perf_counter() - begin

    assert max(run_ranks(4, body)) < SIZES["timeout_s"] / 2


def test_rows_are_counted_by_slot_and_by_expert() -> None:
    def body(group: Any) -> torch.Tensor:
        x, ids, weights = tokens(group.rank)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD)) as buffer:
            buffer.dispatch(x, ids, weights)
            assert buffer.placement is not None
            return buffer.placement.by_expert(buffer.stats(gather=True).rows_per_expert)

    want = torch.bincount(torch.cat([tokens(rank)[1] for rank in range(4)]).flatten(), minlength=4)
    assert all(torch.equal(found, want) for found in run_ranks(4, body))


def test_sums_are_those_without_replicas() -> None:
    """A token's experts are the same ones wherever they are; with exact sums also to the bit, one row a rank."""

    def body(group: Any, placement: Placement | None) -> torch.Tensor:
        x, ids, weights = tokens(group.rank)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=placement) as buffer:
            routed = buffer.dispatch(x, ids, weights)
            held = torch.tensor(list(buffer.local_experts))
            factor = held.repeat_interleave(routed.tokens_per_expert) + 1
            return buffer.combine(routed.x * factor[:, None].bfloat16(), routed.handle, wire="exact")

    spread = Placement([[0], [1], [2], [3]])
    want, got = (run_ranks(4, lambda group, p=p: body(group, p)) for p in (spread, Placement(HELD)))
    for rank, (one, other) in enumerate(zip(want, got, strict=True)):
        x, ids, weights = tokens(rank)
        exact = ((ids + 1) * weights).sum(1, keepdim=True).double() * x.double()
        torch.testing.assert_close(other.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_bad_id_is_named_by_the_ids_of_callers() -> None:
    def body(group: Any) -> str:
        x, ids, weights = tokens(group.rank)
        ids[0, 0] = 4 if group.rank == 2 else 0  # a slot, and no expert
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD)) as buffer:
            with pytest.raises(BadInput, match="topk_idx") as caught:
                buffer.dispatch(x, ids, weights)
            return str(caught.value)

    assert all("expert 4" in text and "-1 to 3" in text for text in run_ranks(4, body))


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_rows_without_room_are_dropped_by_slots(layout: str) -> None:
    def body(group: Any) -> tuple[int, int]:
        x, ids, weights = tokens(group.rank)
        ids[:] = torch.tensor([2, 3])
        with moecomm.Buffer(
            group, **SIZES, backend="host", capacity_factor=0.5, placement=Placement(HELD, choice="token")
        ) as buffer:
            routed = buffer.dispatch(x, ids, weights, layout=layout, overflow="drop")
            assert routed.dropped is not None
            return int(routed.dropped), int(routed.tokens_per_expert.sum())

    found = run_ranks(4, body)
    assert sum(dropped for dropped, _ in found) + sum(arrived for _, arrived in found) == 4 * 12 * 2
    assert sum(dropped for dropped, _ in found) > 0 and found[3][1] == 0


def test_layers_follow_a_change() -> None:
    """Weights of slots move with the experts: layers and modules give the same sums before and after, also backward."""
    hidden, inner = 16, 8
    whole = nn.Experts(range(4), hidden, inner, seed=3, dtype=torch.float32)
    w13, w2 = whole.w13.detach(), whole.w2.detach()

    def body(group: Any) -> None:
        x, ids, weights = tokens(group.rank)
        x = x.float()
        want = formula(x.double(), ids, weights.double(), w13.double(), w2.double())
        sizes = {**SIZES, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, backend="host", placement=Placement(HELD)) as buffer:
            for held in (HELD, [[], [3, 1], [0, 2], [2, 2]]):
                buffer.set_placement(Placement(held))
                mine = torch.tensor(list(buffer.local_experts)).clamp(min=0)
                out = buffer.moe(x, ids, weights, w13[mine], w2[mine])
                torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
                leaf, held13 = x.clone().requires_grad_(), w13[mine].clone().requires_grad_()
                y = moecomm.ops.moe(buffer, leaf, ids, weights, held13, w2[mine].clone())
                torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
                y.sum().backward()
                assert leaf.grad is not None and held13.grad is not None

    assert run_ranks(4, body) == [None] * 4


def test_a_change_amid_a_split_dispatch_and_before_a_repeat() -> None:
    """The other half of a dispatch, its combine and its repeats keep to its rows."""
    sizes = {**SIZES, "dtype": torch.bfloat16}
    del sizes["timeout_s"]
    cases = (random_case(seed, ranks=4, **sizes, payloads=False) for seed in itertools.count())
    case = next(case for case in cases if case.again and case.layout == "expert" and case.max_rows is None)
    others = [Placement([[0, 1], [2, 2], [3, 0], [2, 1]]), Placement([[], [3, 1], [0, 2], [2, 2]])]
    with LocalBuffers(ranks=4, **SIZES, backend="host", placement=Placement(HELD)) as ranks:
        wanted = Wanted(case, ranks.buffers[0])
        calls = [dispatch_call(case, rank, ranks.device) for rank in range(4)]
        routed = ranks.dispatch_begin(calls)
        ranks.set_placement(others[0])
        routed = ranks.dispatch_end(routed)
        ranks.set_placement(others[1])
        again = ranks.dispatch([again_call(calls[rank], here) for rank, here in enumerate(routed)])
        out = ranks.combine([wanted.combine_call(rank, here) for rank, here in enumerate(routed)])
        for rank in range(4):
            wanted.check_routed(rank, routed[rank])
            wanted.check_again(rank, again[rank])
            wanted.check_combined(rank, out[rank])
        check_case(ranks, case)


@pytest.mark.parametrize("early", [False, True])
def test_ranks_with_different_placements(early: bool) -> None:
    """The next round is invalid on all ranks, also if one of them has made the same change a round `early`."""
    moved = Placement([[0, 2], [1, 2], [3, 2], []])

    def body(group: Any) -> str:
        x, ids, weights = tokens(group.rank)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD)) as buffer:
            buffer.combine((routed := buffer.dispatch(x, ids, weights)).x, routed.handle)
            if early:
                if group.rank == 1:
                    buffer.set_placement(moved)
            else:
                buffer.set_placement(Placement([[2, 0], [1, 2], [2, 3], []]) if group.rank == 1 else moved)
            with pytest.raises(Mismatch) as caught:
                buffer.dispatch(x, ids, weights)
            with pytest.raises(moecomm.OutOfStep):
                buffer.dispatch(x, ids, weights)
            return str(caught.value)

    for text in run_ranks(4, body):
        assert "placement" in text and (early or f"generation 2 with digest {moved.digest % (1 << 30):#x}" in text)
        assert "generation 2" in text and ("generation 1" in text) == early

    def opening(group: Any) -> None:
        with pytest.raises(Mismatch, match="placement"):
            moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD) if group.rank else None)

    run_ranks(2, opening)


@pytest.mark.parametrize("choice", ["token", "balanced"])
def test_masked_ranks_leave_their_replicas_to_others(choice: ReplicaChoice) -> None:
    def body(group: Any) -> list[int]:
        x, ids, weights = tokens(group.rank)
        ids[:] = torch.tensor([2, 3])
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(HELD, choice=choice)) as buffer:
            with pytest.raises(BadInput, match="replicas"):
                buffer.mask((), replicas={0: 1})
            if group.rank == 2:
                return []
            buffer.mask([2])
            with pytest.raises(BadInput, match="masked"):
                buffer.set_placement(Placement(HELD, choice=choice))
            routed = buffer.dispatch(x, ids, weights)
            return routed.tokens_per_expert.tolist()

    found = run_ranks(4, body)
    assert found[0] == [18, 0] and found[1] == [0, 18] and found[3] == [0, 0]  # of expert 2; expert 3 is lost


@pytest.mark.parametrize("amid", [False, True])
def test_ranks_that_are_left_keep_their_slots(amid: bool) -> None:
    """If a rank is lost amid a change that some of the others have made already, all go on with the old one."""
    moved = Placement([[0, 1], [2, 2], [3, 0], [2, 1]], choice="token")

    def body(group: Any) -> tuple[list[int], list[int]]:
        x, ids, weights = tokens(group.rank)
        with moecomm.Buffer(
            group, **{**SIZES, "timeout_s": 2 if amid else 20}, backend="host", placement=Placement(HELD)
        ) as buffer:
            if group.rank == 3:
                return [], []
            if not amid or group.rank != 1:
                buffer.set_placement(moved)
                buffer.rounds.slots.filled.update({1: 3} if group.rank == 2 else {})  # it fills a slot for the next one
            if amid:
                with pytest.raises((PeerLost, Mismatch)):
                    buffer.dispatch(x, ids, weights)
            buffer.shrink()
            assert buffer.placement is not None
            assert (buffer.placement.choice == "nearest") == amid
            routed = buffer.dispatch(x, ids, weights)
            return list(buffer.local_experts), routed.tokens_per_expert.tolist()

    found = run_ranks(4, body)[:3]
    held = [[2, 0], [1, 2], [3, -1]] if amid else [[0, 1], [2, 2], [3, 0]]
    assert [one for one, _ in found] == held
    assert sum(sum(counts) for _, counts in found) == 3 * 12 * 2


def test_ranks_join_with_empty_slots() -> None:
    """The others keep theirs; then a rank that has joined gets experts, and a rank is lost."""
    joins = moecomm.local_ranks(4)
    joined = Placement([*HELD[:3], []], num_experts=4, slots=3)
    moved = Placement([[2, 0], [1], [3], [2, 1, 0]], num_experts=4)
    sizes: dict[str, Any] = {**SIZES, "backend": "host"}

    def counted(buffer: moecomm.Buffer, rank: int) -> list[int]:
        x, ids, weights = tokens(rank)
        routed = buffer.dispatch(x, ids, weights)
        out = buffer.combine(routed.x, routed.handle)
        torch.testing.assert_close(out.float(), x.float() * weights.sum(1, keepdim=True), rtol=2e-2, atol=2e-2)
        return routed.tokens_per_expert.tolist()

    def body(group: Any) -> list[list[int]]:
        rank = group.rank
        if rank == 3:
            for _ in range(2):  # the others' errors are those of a rank that joins, too
                with pytest.raises(BadInput, match="placement"):
                    moecomm.Buffer(joins[3], **sizes, placement=joined)
            buffer = moecomm.Buffer(joins[3], **sizes, placement=joined)
        else:
            buffer = moecomm.Buffer(group.of(3), **sizes, placement=Placement(HELD[:3]))
            counted(buffer, rank)
            with pytest.raises(BadInput, match="placement"):
                buffer.grow(joins[rank])
            with pytest.raises(BadInput, match="placement"):
                buffer.grow(joins[rank], placement=HELD)  # type: ignore[arg-type]
            assert buffer.compile_for(4) == 0
            buffer.grow(joins[rank], placement=joined)
        with buffer:
            found = [counted(buffer, rank)]
            assert buffer.num_ranks == 4 and buffer.placement == joined and buffer.num_experts == 4
            buffer.set_placement(moved)
            found.append(counted(buffer, rank))
            if rank == 1:
                return found
            while buffer.num_ranks == 4:
                try:
                    counted(buffer, rank)
                except PeerLost:
                    buffer.shrink()
            return [*found, list(buffer.local_experts)]

    starts = moecomm.local_ranks(3)

    class Started:
        def __init__(self, group: Any) -> None:
            self.rank, self.of = group.rank, lambda _: starts[group.rank]

    found = run_ranks(4, lambda group: body(Started(group) if group.rank < 3 else group))
    assert found[3][0] == [0, 0, 0] and sum(found[3][1]) > 0
    assert [sum(map(sum, (one[step] for one in found))) for step in (0, 1)] == [4 * 12 * 2] * 2
    assert found[0][2] == [2, 0, -1] and found[3][2] == [2, 1, 0]


def test_what_cannot_be_placed() -> None:
    for bad, argument in (
        (lambda: Placement([[0, 1], [1, 3]]), "experts"),  # 2 has no slot
        (lambda: Placement([[0, -2]]), "experts"),
        (lambda: Placement([[0, 4]], num_experts=2), "experts"),
        (lambda: Placement([[0, 1]], slots=1), "slots"),
        (lambda: Placement([[0]], choice="even"), "choice"),  # type: ignore[arg-type]
        (lambda: Placement([]), "num_experts"),
        (lambda: Placement.of_plan([0, 1, 2], 2), "phy2log"),
        (lambda: moecomm.Buffer("self", **SIZES, placement=Placement([[0, 1]])), "placement"),
        (lambda: moecomm.Buffer("self", **SIZES, placement=[[0, 1, 2, 3]]), "placement"),  # type: ignore[arg-type]
        (lambda: moecomm.Buffer("self", **SIZES, placement=Placement([[0, 1], [2, 3]])), "placement"),
    ):
        with pytest.raises(BadInput, match=argument):
            bad()
    with moecomm.Buffer("self", **SIZES) as buffer, pytest.raises(BadInput, match="without"):
        buffer.set_placement(Placement([range(4)]))
    with moecomm.Buffer("self", **SIZES, placement=Placement([range(4)])) as buffer:
        for placement in (Placement([[0, 1, 2]]), Placement([[0, 1, 2, 3, 3]]), None):
            with pytest.raises(BadInput, match=r"placement|slots"):
                buffer.set_placement(placement)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="placement"):
            buffer.grow("self")
        assert replace(buffer.rounds.settings).placement == buffer.placement
