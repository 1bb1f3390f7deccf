"""Evenness with which a routing loads experts and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moecomm.base.experts import owners_of
from moecomm.base.validation import check_integer
from moecomm.errors import BadInput
from moecomm.routing.recorded import Recorded

RANKS = (4, 8, 16, 64)


@dataclass(frozen=True)
class Load:
    """The load of a layer's experts over all its tokens.

    Attributes:
        layer: its name; "" for all layers together.
        calls, tokens: recorded.
        rows: (token, expert) pairs without -1.
        busiest_expert: rows of the busiest expert, as a multiple of even load.
        busiest_rank: likewise for ranks that share the experts as in a Buffer, by the number of ranks. Without numbers
            that exceed the experts.
        entropy: of the experts' shares, in bits; log2 of the number of experts if all are equally loaded.
    """

    layer: str
    calls: int
    tokens: int
    rows: int
    busiest_expert: float
    busiest_rank: dict[int, float]
    entropy: float


def loads(recorded: Recorded, ranks: Sequence[int] = RANKS) -> list[Load]:
    """Return the load of each layer, and first that of all layers together if there are several.

    Raises BadInput for anything but a recording, and for numbers of `ranks` below 1.
    """
    if not isinstance(recorded, Recorded):
        raise BadInput("recorded", type(recorded).__name__, "a Recorded")
    if not isinstance(ranks, (list, tuple)):
        raise BadInput("ranks", repr(ranks), "numbers of ranks")
    for count in ranks:
        check_integer("ranks", count, 1)
    found = []
    if len(recorded.layers) != 1:
        found.append(_load("", len(recorded.records), recorded.topk_idx, recorded.experts, ranks))
    for place, layer in enumerate(recorded.layers):
        calls = int((recorded.records[:, 0] == place).sum())
        ids = recorded.topk_idx[recorded.layer_of_token == place]
        found.append(_load(layer, calls, ids, recorded.experts, ranks))
    return found


def _load(layer: str, calls: int, topk_idx: torch.Tensor, experts: int, ranks: Sequence[int]) -> Load:
    ids = topk_idx[topk_idx >= 0].long()
    by_expert = torch.bincount(ids, minlength=experts)
    share = by_expert[by_expert > 0] / max(1, len(ids))
    busiest_rank = {}
    for count in ranks:
        if count <= experts:
            owners = owners_of(torch.arange(experts), experts, count)
            by_rank = torch.zeros(count, dtype=torch.int64).index_add_(0, owners, by_expert)
            busiest_rank[count] = _of_even(by_rank)
    entropy = float(-(share * share.log2()).sum()) + 0.0  # no -0.0
    return Load(layer, calls, len(topk_idx), len(ids), _of_even(by_expert), busiest_rank, entropy)


def _of_even(counts: torch.Tensor) -> float:
    """Return the largest count as a multiple of the mean; 0 without any."""
    return float(counts.max()) * len(counts) / max(1, int(counts.sum()))
