"""Expected ranks and domains of a token: closed forms for top-k routing, and those of a recorded routing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt
import torch

from moecomm.base.experts import owners_of
from moecomm.errors import BadInput
from moecomm.routing.recorded import Recorded

Array = npt.NDArray[np.float64]

_TOKENS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class DrawnGate:
    """A gate: each token picks `topk` of `experts` without repeats; with `groups` > 1, only inside `topk_groups` of
    these.

    All experts are equally likely. Groups are drawn uniformly. Experts are drawn uniformly inside the drawn groups,
    with at least one from each, because a gate picks a group for its best experts. (How much better these are depends
    on the distribution of scores, which a closed form does not know. tests/simulate/test_routing.py states the
    difference from moecomm.router.)
    """

    experts: int
    topk: int
    groups: int = 1
    topk_groups: int = 1

    def check(self) -> None:
        """Raise BadInput if a value is out of range."""
        if self.experts < 1 or self.groups < 1 or self.experts % self.groups:
            raise BadInput("groups", self.groups, f"a divisor of {self.experts} experts")
        if not 1 <= self.topk_groups <= self.groups:
            raise BadInput("topk_groups", self.topk_groups, f"1 to {self.groups}")
        if not 1 <= self.topk <= self.experts // self.groups * self.topk_groups:
            raise BadInput("topk", self.topk, f"at most the experts of {self.topk_groups} of {self.groups} groups")


@dataclass(frozen=True)
class Spread:
    """The expected routing of one token of any rank.

    Attributes:
        ranks: [R], the probability that the token wants any expert of a rank.
        domains: [D], the probability that it wants any expert of a domain.
        entries: [R], the expected number of its experts on a rank; the sum is topk, less by what is -1 in a recording.
        once: [R], the probability that it wants exactly one expert of a rank.
        experts: the number of experts.
    """

    ranks: Array
    domains: Array
    entries: Array
    once: Array
    experts: int

    @property
    def by_domain(self) -> Array:
        """`ranks` in the shape [D, L]."""
        return self.ranks.reshape(len(self.domains), -1)

    @property
    def topk(self) -> int:
        """The experts of a token, rounded; at least 1, where most entries of a recording are -1."""
        return max(1, round(float(self.entries.sum())))

    @property
    def single(self) -> float:
        """The fraction of (token, rank) pairs in which the token wants one expert of the rank."""
        return float(self.once.sum() / self.ranks.sum())


def spread(gate: DrawnGate, domains: int, ranks: int, skew: float = 0.0) -> Spread:
    """Return the routing of tokens over `domains` x `ranks`; rank r owns the r-th part of the experts (see `owned`).

    With more ranks than experts, an expert has copies on neighboring ranks, and a token takes any of them. A fraction
    `skew` of the tokens wants experts of rank 0 first, and other experts, of any group, only where rank 0 has too few,
    as in `moecomm_bench.case.RoundsCase.routing`.

    Raises:
        BadInput: an argument is out of range.
    """
    gate.check()
    if domains < 1 or ranks < 1:
        raise BadInput("domains, ranks", (domains, ranks), "at least 1 each")
    if not 0 <= skew <= 1:
        raise BadInput("skew", skew, "a part: 0 to 1")
    of_ranks = owned(gate.experts, domains * ranks)
    of_domains = of_ranks.reshape(domains, ranks, -1).sum(axis=1)
    plain = Spread(
        np.array([wanted(gate, shares) for shares in of_ranks]),
        np.array([wanted(gate, shares) for shares in of_domains]),
        of_ranks.sum(axis=1) * gate.topk / gate.experts,
        np.array([wanted_once(gate, shares) for shares in of_ranks]),
        gate.experts,
    )
    if skew == 0:
        return plain
    there = _to_rank_0(gate, of_ranks, of_domains)
    mixed = {
        name: (1 - skew) * getattr(plain, name) + skew * getattr(there, name)
        for name in ("ranks", "domains", "entries", "once")
    }
    return Spread(**mixed, experts=gate.experts)


def recorded_spread(recorded: Recorded, domains: int, ranks: int) -> Spread:
    """Return the routing of the tokens of a file, all layers together, over `domains` x `ranks`.

    Ranks own neighboring experts, as in a Buffer.

    Raises:
        BadInput: more ranks than experts, or an argument that is out of range.
    """
    places = domains * ranks
    if domains < 1 or ranks < 1 or places > recorded.experts:
        most = f"1 to {recorded.experts} ranks: experts of a recorded routing have no copies"
        raise BadInput("domains, ranks", (domains, ranks), most)
    if not recorded.tokens:
        raise BadInput("routing", "a file without tokens", "one with tokens to replay")
    totals = {name: np.zeros(places) for name in ("ranks", "entries", "once")}
    of_domains = np.zeros(domains)
    for ids in torch.split(recorded.topk_idx, _TOKENS_AT_ONCE):
        owner_of = owners_of(ids.long(), recorded.experts, places).numpy()
        token, column = np.nonzero(owner_of >= 0)
        owner = owner_of[token, column]
        pairs, counts = np.unique(token * places + owner, return_counts=True)
        totals["entries"] += np.bincount(owner, minlength=places)
        totals["ranks"] += np.bincount(pairs % places, minlength=places)
        totals["once"] += np.bincount(pairs[counts == 1] % places, minlength=places)
        by_domain = np.unique(token * domains + owner // ranks)
        of_domains += np.bincount(by_domain % domains, minlength=domains)
    means = {name: total / recorded.tokens for name, total in totals.items()}
    return Spread(**means, domains=of_domains / recorded.tokens, experts=recorded.experts)


def owned(experts: int, ranks: int) -> Array:
    """Return [ranks, experts]: the fraction of each expert's copies that each rank holds.

    Up to as many ranks as experts: neighboring experts, and of a remainder the first ranks have one more each, as in a
    Buffer. With more ranks: one expert a rank. Rank r has expert r * experts // ranks, so that the experts with one
    copy more are spread evenly over the ranks.
    """
    held = np.zeros((ranks, experts))
    if ranks > experts:
        held[np.arange(ranks), np.arange(ranks) * experts // ranks] = 1
    else:
        each, more = divmod(experts, ranks)
        sizes = [each + (rank < more) for rank in range(ranks)]
        held[np.repeat(np.arange(ranks), sizes), np.arange(experts)] = 1
    return np.asarray(held / held.sum(axis=0), dtype=np.float64)


def wanted(gate: DrawnGate, shares: Array) -> float:
    """Return the probability that a token wants an expert of a place that holds `shares` [experts] of the experts.

    The formula is 1 - (sum over all choices of the product of 1 - share) / choices. Without groups and copies this is 1
    - C(experts - local, topk) / C(experts, topk).
    """
    return 1 - _picked(gate, _by_group(gate, shares))[0]


def wanted_once(gate: DrawnGate, shares: Array) -> float:
    """Return the probability that a token wants exactly one expert of a place."""
    return _picked(gate, _by_group(gate, shares))[1]


_Groups = tuple[tuple[tuple[float, int], ...], ...]


def _by_group(gate: DrawnGate, shares: Array) -> _Groups:
    return tuple(sorted(_counted(group) for group in shares.reshape(gate.groups, -1)))


def _counted(shares: Array) -> tuple[tuple[float, int], ...]:
    values, counts = np.unique(shares, return_counts=True)
    return tuple((float(value), int(count)) for value, count in zip(values, counts, strict=True))


@lru_cache(maxsize=4096)  # many ranks and domains hold equal shares
def _picked(gate: DrawnGate, groups: _Groups) -> tuple[float, float]:
    """Return the probabilities that a token picks none, and exactly one, of the copies in a place."""
    everything = tuple(((0.0, gate.experts // gate.groups),) for _ in groups)
    choices = _ways(gate, everything)[0]
    none, one = _ways(gate, groups)
    return none / choices, one / choices


@lru_cache(maxsize=4096)
def _ways(gate: DrawnGate, groups: _Groups) -> tuple[float, float]:
    """Return sums over all choices of groups and of experts in them: of the products of 1 - share, and of the products
    in which one factor is a share instead.
    """
    # ways[n, j, k]: the sum over choices of j groups and k experts, n of them in the place.
    ways = np.zeros((2, gate.topk_groups + 1, gate.topk + 1))
    ways[0, 0, 0] = 1
    for group in groups:
        series = np.zeros((2, gate.topk + 1))
        series[0, 0] = 1
        for share, count in group:
            picks = range(gate.topk + 1)
            none = np.array([comb(count, k) * (1 - share) ** k for k in picks])
            one = np.array([comb(count, k) * k * share * (1 - share) ** max(k - 1, 0) for k in picks])
            series = _times(series, np.array([none, one]))
        if gate.groups > 1 and gate.topk >= gate.topk_groups:
            series[0, 0] = 0  # at least one expert of each drawn group is picked
        before = ways.copy()
        for group_number in range(gate.topk_groups):
            ways[:, group_number + 1] += _times(before[:, group_number], series)
    return float(ways[0, -1, -1]), float(ways[1, -1, -1])


def _times(left: Array, right: Array) -> Array:
    """Multiply two power series, up to the first power of the number of experts in the place."""
    most = left.shape[1]
    none = np.convolve(left[0], right[0])[:most]
    one = np.convolve(left[0], right[1])[:most] + np.convolve(left[1], right[0])[:most]
    return np.array([none, one])


def _to_rank_0(gate: DrawnGate, of_ranks: Array, of_domains: Array) -> Spread:
    """Return the routing of tokens that want rank 0 first."""
    own = of_ranks[0] > 0
    local = int(own.sum())
    here = min(local, gate.topk)
    others = gate.experts - local
    ranks, domains, entries, once = (np.zeros(len(part)) for part in (of_ranks, of_domains, of_ranks, of_ranks))
    if rest := gate.topk - here:
        left = DrawnGate(others, rest)
        ranks = np.array([wanted(left, shares[~own]) for shares in of_ranks])
        domains = np.array([wanted(left, shares[~own]) for shares in of_domains])
        once = np.array([wanted_once(left, shares[~own]) for shares in of_ranks])
        entries = of_ranks[:, ~own].sum(axis=1) * rest / others
    ranks[0] = domains[0] = 1
    entries[0] = here
    once[0] = float(here == 1)
    return Spread(ranks, domains, entries, once, gate.experts)
