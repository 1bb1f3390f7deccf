"""Balanced replicas: how ranks divide the entries of a round among the replicas of experts, so that ranks have equally
many.  The specification of csrc/host/choose.cpp and csrc/dispatch/choose.cuh.

All ranks know what each of them sends to each expert.  Experts with one candidate decide a part of each rank's load.
The others begin with even shares.  Then each expert in turn pours its entries anew over the loads that the others
leave, like water, `SHARE_PASSES` times.  Each step takes the sum of squared loads to its least for that expert, so
passes approach the most even loads that the placement allows.

A rank's own entries stay on the rank as far as its share goes.  The others are in order of source ranks, and fill what
is left of the shares in order of slots.

With copies for a round (copies()), experts of busy ranks become candidates in empty slots of idle ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moecomm.base.protocol import COPY_PART, SHARE_PASSES


def pour(entries: int, loads: Sequence[int]) -> list[int]:
    """Divide entries so that the sums with these loads are as even as they get.  Of equal ones, the first has more."""
    filled = list(range(len(loads)))
    while True:
        level, over = divmod(entries + sum(loads[i] for i in filled), len(filled))
        below = [i for i in filled if loads[i] <= level]
        if len(below) == len(filled):
            break
        filled = below
    found = [0] * len(loads)
    for nth, i in enumerate(filled):
        found[i] = level - loads[i] + (nth < over)
    return found


def shares(totals: Sequence[int], candidates: Sequence[Sequence[int]], ranks: int, slots: int) -> list[list[int]]:
    """Return how many entries of each expert go to each of its candidates.

    Args:
        totals: by expert, the entries of all ranks.
        candidates: by expert, slots of different ranks, ascending.
        ranks: their number.
        slots: of a rank.
    """
    owners = [[slot // slots for slot in one] for one in candidates]
    loads, found = [0] * ranks, [[total] * len(one) for total, one in zip(totals, owners, strict=True)]
    several = [expert for expert, one in enumerate(owners) if len(one) > 1]
    for expert in several:
        share, longer = divmod(totals[expert], len(owners[expert]))
        found[expert] = [share + (nth < longer) for nth in range(len(owners[expert]))]
    for one, given in zip(owners, found, strict=True):
        for rank, share in zip(one, given, strict=True):
            loads[rank] += share
    for expert in several * SHARE_PASSES:
        for rank, share in zip(owners[expert], found[expert], strict=True):
            loads[rank] -= share
        found[expert] = pour(totals[expert], [loads[rank] for rank in owners[expert]])
        for rank, share in zip(owners[expert], found[expert], strict=True):
            loads[rank] += share
    return found


def copies(
    totals: Sequence[int], candidates: Sequence[Sequence[int]], empty: Sequence[int], ranks: int, slots: int
) -> list[tuple[int, int]]:
    """Choose experts to copy to empty slots for one round.

    One copy after the other goes from the busiest rank to the idlest of those that hold an expert and have an empty
    slot: of the experts that are not there yet, the one with the largest share on the busiest rank.  Of equals, the
    first counts.  The expert then pours its entries anew.  Copies end where the next one would take fewer entries off
    the busiest rank than a `COPY_PART`-th of the mean.

    Args:
        totals, candidates, ranks, slots: see shares().
        empty: slots, ascending.

    Returns:
        Pairs of an expert and its further slot, in the order of their choice.
    """
    found = shares(totals, candidates, ranks, slots)
    lists, loads = [list(one) for one in candidates], [0] * ranks
    for one, given in zip(lists, found, strict=True):
        for slot, share in zip(one, given, strict=True):
            loads[slot // slots] += share
    held = {slot // slots for one in lists for slot in one}
    free = {rank: [slot for slot in empty if slot // slots == rank] for rank in sorted(held)}
    least, made = max(1, sum(totals) // (ranks * COPY_PART)), list[tuple[int, int]]()
    while any(free.values()):
        busiest = max(range(ranks), key=lambda rank: loads[rank])
        idlest = min((rank for rank, left in free.items() if left), key=lambda rank: loads[rank])
        best, most = 0, 0
        for expert, (one, given) in enumerate(zip(lists, found, strict=True)):
            here = {slot // slots: share for slot, share in zip(one, given, strict=True)}
            if idlest not in here and here.get(busiest, 0) > most:
                best, most = expert, here[busiest]
        if min(most, (loads[busiest] - loads[idlest]) // 2) < least:
            break
        for slot, share in zip(lists[best], found[best], strict=True):
            loads[slot // slots] -= share
        made.append((best, free[idlest].pop(0)))
        lists[best] = sorted([*lists[best], made[-1][1]])
        found[best] = pour(totals[best], [loads[slot // slots] for slot in lists[best]])
        for slot, share in zip(lists[best], found[best], strict=True):
            loads[slot // slots] += share
    return made


def balanced(
    ids: torch.Tensor, rank: int, counts: torch.Tensor, candidates: Sequence[Sequence[int]], slots: int
) -> torch.Tensor:
    """Return the slot of each entry of a rank.

    Args:
        ids: int64, any shape; those that are no expert with a candidate get -1.
        rank: whose entries these are.
        counts: int64 `[ranks, experts]`: the entries of each rank for each expert.
        candidates, slots: see shares().
    """
    found = torch.full_like(ids, -1).flatten()
    given = shares(counts.sum(0).tolist(), candidates, len(counts), slots)
    for expert, one in enumerate(candidates):
        own = [min(share, int(counts[slot // slots, expert])) for share, slot in zip(given[expert], one, strict=True)]
        kept = dict(zip((slot // slots for slot in one), own, strict=True))  # by rank
        first = sum(int(counts[source, expert]) - kept.get(source, 0) for source in range(rank))
        rest = range(first, first + int(counts[rank, expert]) - kept.get(rank, 0))
        taken = [slot for slot in one if slot // slots == rank for _ in range(kept[rank])]
        end = 0
        for slot, share, stays in zip(one, given[expert], own, strict=True):
            end += share - stays
            taken += [slot] * len(rest[max(end - share + stays - first, 0) : max(end - first, 0)])
        at = (ids.flatten() == expert).nonzero().flatten()
        if one:
            found[at] = torch.tensor(taken, dtype=ids.dtype, device=ids.device)
    return found.view_as(ids)
