"""Ways to hold the experts in slots, and how a layer's tokens then spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from moecomm import balance
from moecomm.base.experts import most_experts, owners_of
from moecomm.base.placement import Placement, slots_of
from moecomm.errors import BadInput
from moecomm.routing.recorded import Recorded
from moecomm_bench import replay
from moecomm_bench.plan.case import PlannedCase
from moecomm_bench.simulate.routing import Spread, counted_spread, spread

EXTRA = (0, 1, 2, 4, 8)  # more slots of a rank than its share of the experts


class LayerRouting(NamedTuple):
    """The routing of one layer: its spread over ranks, and a token's expected rows in the busiest slot."""

    spread: Spread
    busiest_slot: float


@dataclass(frozen=True)
class Slots:
    """A way to hold the experts.

    Attributes:
        of_rank: most slots of a rank.
        replicas: slots of all ranks beyond one for each expert.
        placement: of the first layer, which sizes the window; None: neighboring experts, as without a placement.
        layers: the routing of each layer.
    """

    of_rank: int
    replicas: int
    placement: Placement | None
    layers: tuple[LayerRouting, ...]


def ways(case: PlannedCase, ranks: int) -> Iterator[Slots]:
    """Yield the ways to hold the experts on `ranks` ranks, the simplest first.

    Without a recording all experts are equally likely, so replicas would gain nothing: there is one way. With a
    recording, experts are also placed by load, without and with replicas. The first half of a layer's tokens makes the
    placement, and the second half judges every way.
    """
    domains, width = case.domains(ranks)
    experts = case.gate.experts
    share = most_experts(experts, ranks)
    if not case.routing_file:
        routed = spread(case.gate, domains, width)
        alone = None if ranks <= experts else Placement([[rank * experts // ranks] for rank in range(ranks)])
        busiest = float(routed.entries.max()) / share
        yield Slots(share, max(0, ranks - experts), alone, (LayerRouting(routed, busiest),))
        return
    halves = [_halves(ids) for ids in _by_layer(replay.recorded(case.routing_file))]
    later = [after for _, after in halves]
    if ranks <= experts:
        owners = partial(owners_of, num_experts=experts, ranks=ranks)
        alike = tuple(_routed(ids, _itself, owners, experts, (domains, width)) for ids in later)
        yield Slots(share, 0, None, alike)
    load = torch.stack([torch.bincount(ids[ids >= 0].long(), minlength=experts) for ids, _ in halves])
    most = min(experts, balance.MOST_SLOTS // ranks)
    for of_rank in (share + extra for extra in EXTRA if share + extra <= most):
        how: dict[str, Any] = {"ranks": ranks, "slots": of_rank * ranks, "nodes": domains, "policy": "spread"}
        made = balance.plan(load, **how, groups=case.gate.groups if domains > 1 and case.gate.groups > 1 else None)
        placements = [made.placement(layer) for layer in range(len(later))]
        placed = (
            _routed(ids, partial(slots_of, one, rank=0), partial(_rank_of, slots=of_rank), experts, (domains, width))
            for ids, one in zip(later, placements, strict=True)
        )
        yield Slots(of_rank, of_rank * ranks - experts, placements[0], tuple(placed))


def _by_layer(recorded: Recorded) -> list[torch.Tensor]:
    """Return the ids of each layer that has tokens."""
    found = [recorded.topk_idx[recorded.layer_of_token == layer] for layer in range(len(recorded.layers))]
    found = [ids for ids in found if bool((ids >= 0).any())]
    if not found:
        raise BadInput("routing", "a file whose tokens choose no expert", "one with experts")
    return found


def _halves(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that make a placement, and those that judge it: all for both if a half chooses no expert."""
    halves = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    return halves if all(bool((half >= 0).any()) for half in halves) else (ids, ids)


def _itself(ids: torch.Tensor) -> torch.Tensor:
    return ids


def _rank_of(slots_of_tokens: torch.Tensor, slots: int) -> torch.Tensor:
    return slots_of_tokens.div(slots, rounding_mode="floor")


def _routed(
    ids: torch.Tensor,
    slots: Callable[[torch.Tensor], torch.Tensor],
    rank_of: Callable[[torch.Tensor], torch.Tensor],
    experts: int,
    places: tuple[int, int],
) -> LayerRouting:
    """Return the routing of a layer's tokens, by their slots and the ranks of these."""
    taken = slots(ids.long())
    busiest = float(torch.bincount(taken[taken >= 0]).max()) / len(ids)
    return LayerRouting(counted_spread(taken, rank_of, experts, *places), busiest)
