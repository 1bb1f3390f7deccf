"""Plans of expert placement: EPLB's tables, what every plan must be, and what a plan within a budget may change."""

from __future__ import annotations

import time
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecomm import _native
from moecomm.balance import CHOICES, Plan, moves, plan
from moecomm.errors import BadInput

Tables = tuple[list[list[int]], list[list[list[int]]], list[list[int]]]


def packed(load: np.ndarray, packs: int) -> list[list[int]]:
    """The items of each pack: the heaviest first, each to the lightest pack that is not full."""
    room = len(load) // packs
    if room == 1:
        return [[item] for item in range(len(load))]
    found: list[list[int]] = [[] for _ in range(packs)]
    total = [np.float32(0)] * packs
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        pack = min((pack for pack in range(packs) if len(found[pack]) < room), key=lambda pack: total[pack])
        found[pack].append(item)
        total[pack] += load[item]
    return found


def eplb(load: torch.Tensor, replicas: int, groups: int, nodes: int, gpus: int) -> Tables:
    """rebalance_experts of deepseek-ai/EPLB (d52c72d), written again for one layer after the other.

    EPLB sorts with torch's sort, which may order equal loads in any way; here the lower index is first.  So plans are
    the same as EPLB's where no loads but those of replicas of one expert are equal.
    """
    if groups % nodes:
        groups = nodes = 1
    size = load.shape[1] // groups
    phy2log, log2phy, logcnt = [], [], []
    for layer in load.float():
        of_groups = layer.view(groups, size).sum(-1).numpy()
        slots: list[tuple[int, int]] = []  # expert, number of the replica
        for here in packed(of_groups, nodes):
            experts = [group * size + i for group in here for i in range(size)]
            count = dict.fromkeys(experts, 1)
            physical = [(expert, 0) for expert in experts]
            loads = {expert: layer[expert].numpy() for expert in experts}
            while len(physical) < replicas // nodes:
                hot = max(experts, key=lambda expert: loads[expert] / np.float32(count[expert]))
                physical.append((hot, count[hot]))
                count[hot] += 1
            of_slots = np.array([loads[expert] / np.float32(count[expert]) for expert, _ in physical])
            slots += [physical[item] for pack in packed(of_slots, gpus // nodes) for item in pack]
        phy2log.append([expert for expert, _ in slots])
        logcnt.append([phy2log[-1].count(expert) for expert in range(load.shape[1])])
        log2phy.append([[slots.index((e, i)) for i in range(count)] for e, count in enumerate(logcnt[-1])])
    most = max(max(row) for row in logcnt)
    return phy2log, [[row + [-1] * (most - len(row)) for row in layer] for layer in log2phy], logcnt


def drawn(layers: int, experts: int, zipf: float, seed: int = 0) -> torch.Tensor:
    """Loads by Zipf's law, in another order in each layer."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, experts + 1, dtype=torch.float64) ** -zipf
    return torch.stack([popularity[torch.randperm(experts, generator=generator)] for _ in range(layers)]) * 1e6


@st.composite
def loads(draw: st.DrawFn, layers: int, experts: int) -> torch.Tensor:
    seed, kind = draw(st.integers(0, 2**20)), draw(st.sampled_from(("few values", "uniform", "skewed", "zero")))
    generator = torch.Generator().manual_seed(seed)
    if kind == "few values":
        return torch.randint(0, 4, (layers, experts), generator=generator)
    uniform = torch.rand(layers, experts, generator=generator, dtype=torch.float64)
    return {"uniform": 100 * uniform, "skewed": uniform.clamp(min=1e-3) ** -1.5, "zero": 0 * uniform}[kind]


def is_possible(plan: Plan) -> None:
    """Each expert has a slot, each slot an expert, and the tables agree."""
    for layer in range(len(plan.phy2log)):
        experts = plan.phy2log[layer].tolist()
        assert len(experts) == sum(plan.slots) and set(experts) == set(range(plan.num_experts))
        for expert, slots in enumerate(plan.log2phy[layer].tolist()):
            count = int(plan.logcnt[layer, expert])
            assert sorted(slots[:count]) == [slot for slot, held in enumerate(experts) if held == expert]
            assert slots[count:] == [-1] * (len(slots) - count)


def by_rank(plan: Plan, layer: int) -> list[list[int]]:
    return [part.tolist() for part in plan.phy2log[layer].split(plan.slots)]


def nodes_of(plan: Plan, layer: int, groups: int) -> set[tuple[int, int]]:
    """Pairs of a group of experts and a node with one of them."""
    width = plan.ranks // plan.nodes
    ranks = enumerate(by_rank(plan, layer))
    return {(expert * groups // plan.num_experts, rank // width) for rank, held in ranks for expert in held}


def test_the_example_of_eplb() -> None:
    load = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    made = plan(load, ranks=8, slots=16, nodes=2, groups=4)
    assert made.phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert (made.ranks, made.slots, made.nodes, made.num_experts) == (8, (2,) * 8, 2, 12)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tables_are_those_of_eplb(data: st.DataObject) -> None:
    nodes, groups = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.sampled_from((1, 2, 3, 4, 8)))
    ranks, experts = nodes * data.draw(st.integers(1, 4)), groups * data.draw(st.integers(1, 8))
    slots = ranks * data.draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 4))
    load = data.draw(loads(data.draw(st.integers(1, 3)), experts))
    made = plan(load, ranks=ranks, slots=slots, nodes=nodes, groups=groups)
    want = eplb(load, slots, groups, nodes, ranks)
    assert (made.phy2log.tolist(), made.log2phy.tolist(), made.logcnt.tolist()) == want
    is_possible(made)


def test_loads_are_added_in_float32() -> None:
    """The third item makes no difference to the first pack, which gets the fourth as well."""
    load = torch.tensor([[2**24, 2**24, 1, 1, 1, 1, 1, 1]])
    made = plan(load, ranks=2)
    assert made.phy2log.tolist() == eplb(load, 8, 1, 1, 2)[0] == [[0, 2, 3, 4, 1, 5, 6, 7]]


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.2])
@pytest.mark.parametrize(("nodes", "groups"), [(1, None), (4, 8)])
def test_tables_of_a_large_model_are_those_of_eplb(zipf: float, nodes: int, groups: int | None) -> None:
    load = drawn(2, 256, zipf)
    made = plan(load, ranks=32, slots=288, nodes=nodes, groups=groups)
    want = eplb(load, 288, groups or 1, nodes, 32)
    assert (made.phy2log.tolist(), made.log2phy.tolist(), made.logcnt.tolist()) == want


def test_a_plan_of_58_layers_takes_at_most_50_ms() -> None:
    load = drawn(58, 256, 1.2)

    def timed(groups: int | None) -> float:
        begin = time.thread_time()
        plan(load, ranks=32, slots=288, nodes=4, groups=groups)
        return time.thread_time() - begin

    for groups in (None, 8):
        assert min(timed(groups) for _ in range(5)) <= 0.05


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, int | None]:
    """Experts, slots of ranks (some without), nodes, and groups that are packed to nodes or None."""
    nodes, width = draw(st.sampled_from((1, 1, 2, 3))), draw(st.integers(1, 4))
    slots = draw(st.lists(st.integers(0, 6), min_size=nodes * width, max_size=nodes * width))
    of_nodes = [sum(slots[node * width : (node + 1) * width]) for node in range(nodes)]
    if min(of_nodes) and draw(st.booleans()):
        inside = draw(st.integers(1, min(of_nodes)))
        return inside * nodes, tuple(slots), nodes, nodes * draw(st.sampled_from((1, inside)))
    slots[0] += sum(slots) == 0
    return draw(st.integers(1, sum(slots))), tuple(slots), nodes, None


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters(), st.sampled_from(CHOICES))
def test_spread_experts(
    data: st.DataObject, cluster: tuple[int, tuple[int, ...], int, int | None], choice: str
) -> None:
    experts, slots, nodes, groups = cluster
    load = data.draw(loads(2, experts))
    made = plan(load, ranks=len(slots), slots=slots, nodes=nodes, groups=groups, policy="spread", choice=choice)
    is_possible(made)
    for layer in range(2):
        for rank in by_rank(made, layer):
            if len(rank) <= experts // (1 if groups is None else nodes):
                assert len(set(rank)) == len(rank)
        if groups is not None:
            assert len(nodes_of(made, layer, groups)) == groups
    again = plan(load, ranks=len(slots), slots=slots, nodes=nodes, groups=groups, policy="spread", choice=choice)
    assert torch.equal(again.log2phy, made.log2phy) and torch.equal(again.phy2log, made.phy2log)


@pytest.mark.parametrize("zipf", [0.8, 1.2])
@pytest.mark.parametrize(("ranks", "slots"), [(8, 144), (32, 288), (64, 320)])
def test_spread_experts_are_at_least_as_even_as_eplb(zipf: float, ranks: int, slots: int) -> None:
    load = drawn(4, 256, zipf)
    if slots < 256:
        load = load[:, :128]
    theirs, ours = (plan(load, ranks=ranks, slots=slots, policy=policy) for policy in ("eplb", "spread"))
    assert (ours.predicted(load) <= theirs.predicted(load) + 2e-3).all()


@pytest.mark.parametrize("zipf", [0.8, 1.2])
@pytest.mark.parametrize(("nodes", "ranks", "slots"), [(2, 16, 288), (4, 32, 512), (8, 64, 320)])
def test_plans_for_nearest_replicas_keep_rows_on_nodes(zipf: float, nodes: int, ranks: int, slots: int) -> None:
    load = drawn(4, 256, zipf)
    theirs = plan(load, ranks=ranks, slots=slots, nodes=nodes)
    ours = plan(load, ranks=ranks, slots=slots, nodes=nodes, policy="spread", choice="nearest")
    assert (ours.crossing(load) < 0.9 * theirs.crossing(load)).all()
    assert (ours.predicted(load, "nearest") < theirs.predicted(load, "nearest")).all()
    assert (ours.predicted(load, "nearest") < 1.15).all()
    on_nodes = [
        [sum(expert in rank for rank in by_rank(ours, 0)[first : first + ranks // nodes]) for expert in range(256)]
        for first in range(0, ranks, ranks // nodes)
    ]
    assert max(max(counts) - min(counts) for counts in zip(*on_nodes, strict=True)) <= 2


def test_replicas_are_spread_over_nodes_before_loads_are() -> None:
    """Expert 1 has two replicas, of which the second would be lightest beside the first."""
    load = torch.tensor([[5.0, 6, 0.1, 0.1, 0.1, 0.1, 0.1]])
    made = plan(load, ranks=4, slots=8, nodes=2, policy="spread")
    assert {node for expert, node in nodes_of(made, 0, 7) if expert == 1} == {0, 1}


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters())
def test_predicted_loads(data: st.DataObject, cluster: tuple[int, tuple[int, ...], int, int | None]) -> None:
    experts, slots, nodes, groups = cluster
    load = data.draw(loads(2, experts)).double()
    made = plan(load, ranks=len(slots), slots=slots, nodes=nodes, groups=groups)
    width = len(slots) // nodes
    for layer in range(2):
        ranks = by_rank(made, layer)
        even, nearest, away = np.zeros(len(slots)), np.zeros(len(slots)), 0.0
        for expert in range(experts):
            places = [rank for rank, held in enumerate(ranks) for one in held if one == expert]
            for rank in places:
                even[rank] += float(load[layer, expert]) / len(places)
            for node in range(nodes):
                near = [rank for rank in places if rank // width == node]
                away += 0.0 if near else float(load[layer, expert]) / nodes
                for rank in near or places:
                    nearest[rank] += float(load[layer, expert]) / nodes / len(near or places)
        for choice, want in (("even", even), ("nearest", nearest)):
            assert made.rank_loads(load, choice)[layer].numpy() == pytest.approx(want)
            mean = want.sum() / sum(count > 0 for count in slots)
            assert float(made.predicted(load, choice)[layer]) == pytest.approx(want.max() / mean if mean else 1.0)
        total = float(load[layer].sum())
        assert float(made.crossing(load)[layer]) == pytest.approx(away / total if total else 0.0)


def fewest_changes(before: Plan, after: Plan, layer: int) -> int:
    """Try all ways to renumber nodes, ranks inside nodes, and slots."""
    width = before.ranks // before.nodes
    old, new = (
        [ranks[first : first + width] for first in range(0, before.ranks, width)]
        for ranks in (by_rank(before, layer), by_rank(after, layer))
    )

    def kept(here: list[list[int]], there: list[list[int]]) -> int:
        """Slots that keep their experts; far below 0 where ranks differ in their number of slots."""
        alike = all(len(held) == len(had) for held, had in zip(here, there, strict=True))
        both = zip(here, there, strict=True)
        same = sum(min(held.count(e), had.count(e)) for held, had in both for e in set(held))
        return same if alike else -(10**6)

    most = [[max(kept(list(order), had) for order in permutations(held)) for had in old] for held in new]
    nodes = range(before.nodes)
    return sum(before.slots) - max(sum(most[n][at] for n, at in enumerate(order)) for order in permutations(nodes))


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters(), st.sampled_from(("eplb", "spread")))
def test_a_new_plan_is_renumbered_so_that_the_fewest_experts_move(
    data: st.DataObject, cluster: tuple[int, tuple[int, ...], int, int | None], policy: str
) -> None:
    experts, slots, nodes, groups = cluster
    old, new = (data.draw(loads(2, experts)) for _ in range(2))
    before = plan(old, ranks=len(slots), slots=slots, nodes=nodes, groups=groups, policy=policy)
    anew = plan(new, ranks=len(slots), slots=slots, nodes=nodes, groups=groups, policy=policy)
    after = plan(new, previous=before, groups=groups, policy=policy)
    is_possible(after)
    for layer in range(2):
        changed = int((after.phy2log[layer] != before.phy2log[layer]).sum())
        assert changed == fewest_changes(before, anew, layer)
    for choice in CHOICES:
        assert torch.allclose(after.predicted(new, choice), anew.predicted(new, choice), rtol=1e-12)
    assert torch.equal(plan(old, previous=before, groups=groups, policy=policy).phy2log, before.phy2log)


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters(), st.sampled_from(("eplb", "spread")), st.sampled_from(CHOICES), st.integers(0, 12))
def test_a_plan_within_a_budget(
    data: st.DataObject,
    cluster: tuple[int, tuple[int, ...], int, int | None],
    policy: str,
    choice: str,
    budget: int,
) -> None:
    experts, slots, nodes, groups = cluster
    old, new = (data.draw(loads(3, experts)) for _ in range(2))
    before = plan(old, ranks=len(slots), slots=slots, nodes=nodes, groups=groups, policy=policy, choice=choice)
    after = plan(new, previous=before, groups=groups, policy=policy, choice=choice, max_moves=budget)
    is_possible(after)
    copied = moves(before, after)
    assert len(copied) == int((after.phy2log != before.phy2log).sum()) <= budget
    most, was = after.rank_loads(new, choice).amax(1), before.rank_loads(new, choice).amax(1)
    assert (most <= was * (1 + 1e-12)).all()
    for layer in range(3):
        for held, had in zip(by_rank(after, layer), by_rank(before, layer), strict=True):
            if policy == "spread":
                twice = len(held) - len(set(held))
                assert twice <= len(had) - len(set(had)) or twice <= max(0, len(held) - experts)
    if groups is not None:
        assert all(len(nodes_of(after, layer, groups)) == groups for layer in range(3))
    by_bytes = plan(
        new, previous=before, groups=groups, policy=policy, choice=choice, max_bytes=7 * budget + 6, expert_bytes=7
    )
    assert torch.equal(by_bytes.phy2log, after.phy2log)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("budget", [1, 2, 6])
def test_few_copies_make_no_more_rows_leave_their_node(choice: str, budget: int) -> None:
    """A new plan takes more copies than that."""
    for seed in range(20):
        load, other = drawn(2, 32, 1.0, seed), drawn(2, 32, 1.0, seed + 100)
        before = plan(load, ranks=8, slots=48, nodes=4, policy="spread", choice=choice)
        after = plan(other, previous=before, policy="spread", choice=choice, max_moves=budget)
        assert moves(before, after)
        assert (after.crossing(other) <= before.crossing(other) * (1 + 1e-12)).all()


def test_a_larger_budget_helps_more_and_the_worst_layers_first() -> None:
    generator = torch.Generator().manual_seed(1)
    old = drawn(8, 128, 1.0)
    before = plan(old, ranks=16, slots=144, policy="spread")
    new = old * (1 + 0.02 * torch.rand(8, 128, generator=generator))
    new[3] = drawn(1, 128, 1.0, seed=5)[0] * 1.5
    was = before.rank_loads(new).amax(1)
    sums = []
    for budget in (0, 2, 8, 32, 128, 2000):
        after = plan(new, previous=before, policy="spread", max_moves=budget)
        sums.append(float(after.rank_loads(new).amax(1).sum()))
        if budget == 8:  # most of them in the layer that has changed most
            assert sum(move.layer == 3 for move in moves(before, after)) >= 5
    assert sums == sorted(sums, reverse=True) and sums[0] == float(was.sum()) and len(set(sums)) == len(sums)
    assert (after.predicted(new) < 1.01).all()


def test_what_is_left_of_a_budget_removes_second_replicas() -> None:
    """EPLB puts two replicas of the hottest expert on a rank; nothing else is to be done (EPLB's issue 22)."""
    load = torch.tensor([[6.0, 1, 1, 1, 1]])
    before = Plan.from_phy2log(torch.tensor([[0, 0, 1, 2, 3, 4]]), slots=[3, 3])
    after = plan(load, previous=before, policy="spread", max_moves=3)
    assert all(len(set(rank)) == 3 for rank in by_rank(after, 0))
    same = torch.tensor([[1.0, 1, 1, 1, 1, 1]])
    before = Plan.from_phy2log(torch.tensor([[0, 0, 1, 2, 3, 4, 5, 5]]), slots=[4, 4])
    after = plan(same, previous=before, policy="spread", max_moves=2)
    assert all(len(set(rank)) == 4 for rank in by_rank(after, 0)) and len(moves(before, after)) == 2


def test_second_replicas_stay_where_their_removal_would_add_load() -> None:
    load = torch.tensor([[9.0, 6, 4]])
    before = Plan.from_phy2log(torch.tensor([[0, 0, 1, 0, 2]]), slots=[3, 2])
    assert before.rank_loads(load).tolist() == [[12, 7]]
    assert moves(before, plan(load, previous=before, policy="spread", max_moves=1)) == []


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters(), st.sampled_from(CHOICES), st.integers(0, 5))
def test_steps_say_what_they_take(
    data: st.DataObject, cluster: tuple[int, tuple[int, ...], int, int | None], choice: str, most_copies: int
) -> None:
    experts, slots, nodes, groups = cluster
    old, new = (data.draw(loads(1, experts)).double() for _ in range(2))
    before = plan(old, ranks=len(slots), slots=slots, nodes=nodes, groups=groups)
    balance = _native.Balance(1, experts, list(slots), nodes, groups is not None, choice == "nearest")
    improved = before.phy2log.clone()
    (steps,) = balance.improve(new.data_ptr(), most_copies, improved.data_ptr())
    made, most = before.phy2log.clone(), float(before.rank_loads(new, choice).max())
    for at, to, copies, after in steps:
        made[0, at] = torch.tensor(to)
        now = made.clone()
        balance.keep_slots(before.phy2log.data_ptr(), False, now.data_ptr())
        assert int((now != before.phy2log).sum()) == copies <= most_copies
        assert after <= most
        most = after
        found = Plan.from_phy2log(made, slots=slots, num_experts=experts, nodes=nodes)
        assert float(found.rank_loads(new, choice).max()) == pytest.approx(most)
    assert torch.equal(made, improved)


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters())
def test_moves(data: st.DataObject, cluster: tuple[int, tuple[int, ...], int, int | None]) -> None:
    experts, slots, nodes, groups = cluster
    before, after = (
        plan(data.draw(loads(2, experts)), ranks=len(slots), slots=slots, nodes=nodes, groups=groups) for _ in range(2)
    )
    rank, width = before.rank_of_slot().tolist(), len(slots) // nodes
    made = before.phy2log.clone()
    found = moves(before, after)
    assert [(move.layer, move.destination) for move in found] == [
        (layer, slot) for layer, slot in (before.phy2log != after.phy2log).nonzero().tolist()
    ]
    for layer, expert, source, destination in found:
        assert before.phy2log[layer, source] == expert
        made[layer, destination] = expert
        places = [rank[slot] for slot, held in enumerate(before.phy2log[layer].tolist()) if held == expert]
        here = rank[destination]
        if here in places:
            assert rank[source] == here
        elif any(place // width == here // width for place in places):
            assert rank[source] // width == here // width
    assert torch.equal(made, after.phy2log)


def test_sources_of_copies_take_turns() -> None:
    """Expert 0 is on ranks 0 to 3, of two nodes, and goes to four more; then again in the next layer."""
    before = torch.tensor([[0, 1, 0, 2, 0, 3, 0, 4] + [5] * 8] * 2)
    after = before.clone()
    after[:, [8, 10, 12, 14]] = 0
    pair = [Plan.from_phy2log(table, ranks=8) for table in (before, after)]
    assert [(move.layer, move.source, move.destination) for move in moves(*pair)] == [
        (layer, source, destination)
        for layer in range(2)
        for source, destination in zip((0, 2, 4, 6), (8, 10, 12, 14), strict=True)
    ]
    mixed = [Plan.from_phy2log(table[:1].roll(4, 1), ranks=8, nodes=4) for table in (before, after)]
    assert [move.source for move in moves(*mixed)] == [4, 6, 8, 10]
    assert moves(pair[0], pair[0]) == []


def test_a_plan_of_a_table() -> None:
    table = torch.tensor([2, 0, 1, 0, 2, 3, 0], dtype=torch.int32)
    made = Plan.from_phy2log(table, ranks=3)
    assert made.slots == (3, 2, 2) and made.logcnt.tolist() == [[3, 1, 2, 1]]
    assert made.log2phy.tolist() == [[[1, 3, 6], [2, -1, -1], [0, 4, -1], [5, -1, -1]]]
    assert made.rank_of_slot().tolist() == [0, 0, 0, 1, 1, 2, 2]
    wider = torch.nn.functional.pad(made.log2phy, (0, 2), value=-1)
    assert Plan(wider, made.logcnt, made.phy2log, [3, 2, 2]).slots == (3, 2, 2)  # type: ignore[arg-type]
    assert Plan.from_phy2log(table, slots=[0, 7, 0], num_experts=4).slots == (0, 7, 0)
    table[0] = 1
    assert made.phy2log[0, 0] == 2
    default = Plan.from_phy2log(torch.arange(10), ranks=4)  # as a Buffer shares experts
    assert by_rank(default, 0) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def refused(argument: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(BadInput) as raised:
        plan(*args, **kwargs)  # type: ignore[arg-type]
    assert raised.value.argument == argument, raised.value


def test_arguments_that_cannot_be() -> None:
    load = torch.ones(2, 6)
    before = plan(load, ranks=3, slots=6)
    for bad in (None, torch.ones(2, 3, 4), -load, load / 0, load.bool(), load.to(torch.complex64), torch.ones(0, 6)):
        refused("load", bad, ranks=3)
    refused("load", torch.ones(2, 5), previous=before)
    for ranks in (None, 0, 2.0, True):
        refused("ranks", load, ranks=ranks)
    for slots in (5, 0, -1, [2, 2, 1], [3, 3], [7, -1, 0], [6, 0.0, 0], "666", []):
        refused("slots", load, ranks=3, slots=slots)
    refused("nodes", load, ranks=3, nodes=2)
    refused("nodes", load, ranks=3, nodes=0)
    refused("groups", load, ranks=2, nodes=2, groups=4)
    refused("groups", load, ranks=2, groups=0)
    refused("slots", load, ranks=2, nodes=2, groups=2, slots=[4, 2])
    refused("policy", load, ranks=3, policy="greedy")
    refused("choice", load, ranks=3, choice="token")
    refused("max_moves", load, ranks=3, max_moves=1)
    refused("max_bytes", load, ranks=3, max_bytes=1, expert_bytes=1)
    refused("expert_bytes", load, previous=before, max_bytes=1)
    refused("expert_bytes", load, previous=before, expert_bytes=1)
    refused("max_moves", load, previous=before, max_moves=-1)
    refused("max_bytes", load, previous=before, max_bytes=-1, expert_bytes=1)
    refused("previous", load, previous=before.phy2log)
    refused("ranks", load, previous=before, ranks=2)
    refused("slots", load, previous=before, slots=7)
    refused("nodes", load, previous=before, nodes=3)
    assert torch.equal(plan(load, previous=before, ranks=3, slots=[2, 2, 2], nodes=1).phy2log, before.phy2log)


def test_tables_that_cannot_be() -> None:
    good = Plan.from_phy2log(torch.tensor([[0, 1, 2, 0]]), ranks=2)
    log2phy, logcnt, phy2log = good.log2phy, good.logcnt, good.phy2log

    def refused(argument: str, *args: object) -> None:
        with pytest.raises(BadInput) as raised:
            Plan(*args)  # type: ignore[arg-type]
        assert raised.value.argument == argument, raised.value

    refused("phy2log", log2phy, logcnt, torch.tensor([[0, 1, 1, 0]]), (2, 2))
    refused("phy2log", log2phy, logcnt, torch.tensor([[0, 1, 3, 0]]), (2, 2))
    refused("phy2log", log2phy, logcnt, phy2log.float(), (2, 2))
    refused("phy2log", log2phy, logcnt, phy2log.repeat(2, 1), (2, 2))
    refused("logcnt", log2phy, logcnt + 1, phy2log, (2, 2))
    refused("logcnt", log2phy, logcnt[:, :2], phy2log, (2, 2))
    refused("log2phy", log2phy[0], logcnt, phy2log, (2, 2))
    for bad in ([[0, 0], [1, -1], [2, -1]], [[0, 3], [1, 1], [2, -1]], [[0, 2], [1, -1], [3, -1]], [[0], [1], [2]]):
        refused("log2phy", torch.tensor([bad]), logcnt, phy2log, (2, 2))
    refused("log2phy", torch.tensor([[[0, 9], [1, -1], [2, -1]]]), logcnt, phy2log, (2, 2))
    refused("slots", log2phy, logcnt, phy2log, (2, 3))
    refused("slots", log2phy, logcnt, phy2log, 2)
    refused("nodes", log2phy, logcnt, phy2log, (2, 2), 3)
    for kwargs in ({}, {"ranks": 2, "slots": [4]}, {"slots": [2, 1]}, {"ranks": 2, "num_experts": 4}):
        with pytest.raises(BadInput):
            Plan.from_phy2log(phy2log, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="before"):
        moves(phy2log, good)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="as before"):
        moves(good, Plan.from_phy2log(phy2log, slots=[1, 3]))
    with pytest.raises(BadInput, match="load"):
        good.predicted(torch.ones(4))
    with pytest.raises(BadInput, match="choice"):
        good.predicted(torch.ones(3), "token")  # type: ignore[arg-type]


def test_plans_are_placements_of_buffers() -> None:
    found = plan(torch.tensor([5.0, 1, 1, 1, 1, 1]), ranks=3, slots=8, policy="spread")
    placement = found.placement(choice="token")
    assert found.slots == (3, 3, 2) and placement.slots == 3 and placement.experts[2, 2] == -1
    assert torch.equal(placement.logcnt, found.logcnt[0])
    held = [sorted(one) for one in torch.split(found.phy2log[0], found.slots)]
    assert [sorted(e for e in row if e >= 0) for row in placement.experts.tolist()] == held
