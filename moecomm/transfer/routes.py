"""Routes of a transfer: which rank casts which experts, which ranks receive them, and where they lie in a Window.

All ranks compute the same routes from both placements, so no rank asks another for an address.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moecomm.base.placement import NONE, Placement
from moecomm.errors import BadInput


@dataclass
class Route:
    """Route of one rank in a transfer.  The keys of all attributes are experts.

    Attributes:
        slots: slots of this rank that the expert goes to.
        places: number of the record in the memory of this rank, of each expert that it serves.
        reads: rank that casts each expert that this rank serves: this rank, if it has the expert.
        casts: row in this rank's tensors of each expert that it casts, in the order in which it does: those that others
            serve come first.
        homes: rank to whose memory this one writes each expert that it casts: itself, if it serves the expert, else one
            of the readers.
        readers: the other ranks that serve an expert which this rank casts; they copy it from its home.
    """

    slots: dict[int, list[int]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    casts: dict[int, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)


def routes_of(source: Placement, target: Placement) -> list[Route]:
    """Return the route of each rank.

    A rank that has an expert and serves it casts its own.  All others get an expert from one rank, which casts it for
    all of them: a rank that casts it for itself anyway, else the one with the fewest experts to send so far.  Where
    that rank does not serve the expert, it writes to the reader that has been written to least so far.

    Raises:
        BadInput: `target` wants an expert that `source` has on no rank.
    """
    held = [_first_rows(row) for row in source.held]
    found = [Route(_slots(row)) for row in target.held]
    readers: dict[int, list[int]] = {}
    for rank, route in enumerate(found):
        route.places = {expert: place for place, expert in enumerate(route.slots)}
        for expert in route.slots:
            if expert in held[rank]:
                route.casts[expert] = held[rank][expert]
                route.reads[expert] = route.homes[expert] = rank
            else:
                readers.setdefault(expert, []).append(rank)
    sends, homes = Counter[int](), Counter[int]()
    for expert, ranks in sorted(readers.items()):
        holders = [rank for rank, rows in enumerate(held) if expert in rows]
        if not holders:
            raise BadInput("source", f"no slot for expert {expert}", "one for each expert of target")
        sender = min(holders, key=lambda rank: (expert not in found[rank].casts, sends[rank], rank))
        sends[sender] += 1
        route = found[sender]
        route.casts[expert] = held[sender][expert]
        route.readers[expert] = ranks
        if expert not in route.homes:
            route.homes[expert] = min(ranks, key=lambda rank: (homes[rank], rank))
            homes[route.homes[expert]] += 1
        for rank in ranks:
            found[rank].reads[expert] = sender
    for route in found:
        route.casts = {expert: route.casts[expert] for expert in sorted(route.casts, key=_turns(route).__getitem__)}
    return found


def _turns(route: Route) -> dict[int, tuple[int, int]]:
    """Return when a rank casts an expert: those of its readers in turn, so that none waits for all of another's."""
    begun, found = Counter[int](), {}
    for expert in route.casts:
        first = min(route.readers.get(expert, [-1]))
        found[expert] = (begun[first] if first >= 0 else len(route.casts)), expert
        begun[first] += 1
    return found


def _first_rows(row: tuple[int, ...]) -> dict[int, int]:
    """Return the first slot of each expert that a rank holds."""
    return {expert: slot for slot, expert in reversed(list(enumerate(row))) if expert != NONE}


def _slots(row: tuple[int, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for slot, expert in enumerate(row):
        if expert != NONE:
            found.setdefault(expert, []).append(slot)
    return found
