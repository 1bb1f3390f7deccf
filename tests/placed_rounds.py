"""A round of a Buffer with a placement, compared with the specification: the slot of each entry, and the sums."""

from __future__ import annotations

import random
from typing import Any

import torch

from moecomm import Placement
from moecomm.base.placement import of_ranks, replicated, slots_of
from moecomm.testing import LocalBuffers
from moecomm.testing.cases import random_placement
from moecomm.weights.copies import Copies

SIZES: dict[str, Any] = {"hidden": 16, "topk": 3, "max_tokens": 20, "dtype": torch.float32, "timeout_s": 20}


def routing(seed: int, rank: int, experts: int) -> torch.Tensor:
    """Draw skewed ids of a rank, some of them -1."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    load = torch.rand(experts, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-6
    count = int(torch.randint(0, SIZES["max_tokens"] + 1, (1,), generator=g))
    ids = torch.multinomial(load.expand(max(count, 1), -1), SIZES["topk"], replacement=True, generator=g)[:count]
    return torch.where(torch.rand(ids.shape, generator=g) < 0.1, -1, ids)


def wanted(seed: int, placement: Placement, masked: tuple[int, ...] = (), replicates: bool = False) -> list[Any]:
    """Return the slots of the entries of all ranks; masked ranks have no tokens."""
    ids = [routing(seed, rank, placement.num_experts) for rank in range(placement.ranks)]
    ids = [one[:0] if rank in masked else one for rank, one in enumerate(ids)]
    counts = None
    if placement.choice == "balanced":
        counts = torch.stack([torch.bincount(one[one >= 0], minlength=placement.num_experts) for one in ids])
        placement = replicated(placement, counts, masked) if replicates else placement
    return [slots_of(placement, one, rank, None, masked, counts) for rank, one in enumerate(ids)]


def check_rank(slots: list[Any], rank: int, per_slot: int, counts: torch.Tensor) -> torch.Tensor:
    """Compare the rows of the slots of a rank, and return the results of its experts: one more than the slot."""
    want = torch.bincount(torch.cat([one[one >= 0] for one in slots]), minlength=len(slots) * per_slot)
    here = torch.arange(rank * per_slot, (rank + 1) * per_slot)
    assert torch.equal(counts.long(), want[here]), (rank, counts, want[here])
    return (here + 1).repeat_interleave(counts.long())[:, None].expand(-1, SIZES["hidden"]).float().contiguous()


def check_sums(slots: torch.Tensor, out: torch.Tensor) -> None:
    """Compare the sums of a rank, which are whole numbers."""
    want = torch.where(slots >= 0, slots + 1, 0).sum(1).float()
    assert torch.equal(out, want[:, None].expand_as(out)), (slots, out[:, 0])


def check(ranks: LocalBuffers, seed: int, placement: Placement, masked: tuple[int, ...], replicates: bool) -> None:
    """Make a round of the ranks that take part, and compare it."""
    slots = wanted(seed, placement, masked, replicates)
    calls = []
    for buffer in ranks.buffers:
        ids = routing(seed, buffer.rank, placement.num_experts)
        about = {"copies": Copies(buffer.rounds, [], ()).run} if replicates else {}
        calls.append({"x": torch.ones(len(ids), SIZES["hidden"]), "topk_idx": ids, "layout": "expert", **about})
    routed = ranks.dispatch(calls)
    there = [buffer.rank for buffer in ranks.buffers]
    ys = [
        check_rank(slots, rank, placement.slots, one.tokens_per_expert) for rank, one in zip(there, routed, strict=True)
    ]
    combines = [
        {"y": torch.zeros(one.handle.y_shape).index_copy(0, torch.arange(len(y)), y), "handle": one.handle}
        for y, one in zip(ys, routed, strict=True)
    ]
    for rank, out in zip(there, ranks.combine(combines), strict=True):
        check_sums(slots[rank], out)


def check_random(seed: int, rounds: int = 6) -> None:
    """Check rounds of random sizes: ranks and experts that are lost, a placement that changes, masked ranks."""
    rng = random.Random(f"placed rounds {seed}")
    ranks, lost, balanced = rng.randint(2, 5), rng.choice([0, 1, 2, 6]), seed % 2 == 0
    experts = rng.randint(1, 4) * (ranks + lost) + rng.randint(0, 2)
    sizes: dict[str, Any] = {"ranks": ranks, "num_experts": experts}
    placement = random_placement(seed, **sizes, balanced=balanced, lost=lost)
    masked = tuple(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
    with LocalBuffers(**sizes, **SIZES, backend="host", placement=placement) as buffers:
        for nth in range(rounds):
            check(buffers, 100 * seed + nth, placement, (), balanced and nth % 2 == 1)
            if nth % 2:
                moved: dict[str, Any] = {"slots": placement.slots, "balanced": balanced, "lost": lost}
                placement = random_placement(100 * seed + nth, **sizes, **moved)
                buffers.set_placement(placement)
        buffers.mask(masked)
        for nth in range(rounds):
            check(buffers, 100 * seed + nth, placement, masked, balanced and nth % 2 == 1)
        buffers.unmask(masked)
        check(buffers, seed, placement, (), balanced)


def left(placement: Placement, lost: int) -> Placement:
    """Return what the ranks but one hold."""
    return of_ranks(placement, [rank for rank in range(placement.ranks) if rank != lost])
