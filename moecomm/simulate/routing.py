"""Expected ranks and domains of a token: closed forms for top-k routing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

from moecomm.errors import BadInput

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gate:
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
        entries: [R], the expected number of its experts on a rank; the sum is topk.
    """

    ranks: Array
    domains: Array
    entries: Array

    @property
    def by_domain(self) -> Array:
        """`ranks` in the shape [D, L]."""
        return self.ranks.reshape(len(self.domains), -1)


def spread(gate: Gate, domains: int, ranks: int, skew: float = 0.0) -> Spread:
    """Return the routing of tokens over `domains` x `ranks`; rank r owns the r-th part of the experts.

    With more ranks than experts, each expert has a copy on several neighboring ranks, and a token takes any of them. A
    fraction `skew` of the tokens wants experts of rank 0 first, and other experts, of any group, only where rank 0 has
    too few, as in `moecomm.bench.case.Case.routing`.

    Raises:
        BadInput: an argument is out of range, or ranks and experts do not divide each other.
    """
    gate.check()
    if domains < 1 or ranks < 1:
        raise BadInput("domains, ranks", (domains, ranks), "at least 1 each")
    if gate.experts % (domains * ranks) and domains * ranks % gate.experts:
        raise BadInput("domains x ranks", domains * ranks, f"a divisor or a multiple of {gate.experts} experts")
    if not 0 <= skew <= 1:
        raise BadInput("skew", skew, "a part: 0 to 1")
    of_ranks, of_domains = owned(gate.experts, domains * ranks), owned(gate.experts, domains)
    plain = Spread(
        np.array([wanted(gate, shares) for shares in of_ranks]),
        np.array([wanted(gate, shares) for shares in of_domains]),
        of_ranks.sum(axis=1) * gate.topk / gate.experts,
    )
    if skew == 0:
        return plain
    there = _to_rank_0(gate, of_ranks, of_domains)
    pairs = zip((plain.ranks, plain.domains, plain.entries), (there.ranks, there.domains, there.entries), strict=True)
    return Spread(*((1 - skew) * anywhere + skew * hot for anywhere, hot in pairs))


def owned(experts: int, parts: int) -> Array:
    """Return [parts, experts]: the fraction of each expert's copies that each of `parts` equal parts holds."""
    copies = max(1, parts // experts)
    slots = max(1, experts // parts) if parts <= experts else 1
    begin = np.arange(parts)[:, None] * slots - np.arange(experts)[None, :] * copies
    held = np.clip(begin + slots, 0, copies) - np.clip(begin, 0, copies)
    return np.asarray(held / copies, dtype=np.float64)


def wanted(gate: Gate, shares: Array) -> float:
    """Return the probability that a token wants an expert of a place that holds `shares` [experts] of the experts.

    The formula is 1 - (sum over all choices of the product of 1 - share) / choices. Without groups and copies this is 1
    - C(experts - local, topk) / C(experts, topk).
    """
    return _wanted(gate, tuple(sorted(_counted(group) for group in shares.reshape(gate.groups, -1))))


def _counted(shares: Array) -> tuple[tuple[float, int], ...]:
    values, counts = np.unique(shares, return_counts=True)
    return tuple((float(value), int(count)) for value, count in zip(values, counts, strict=True))


@lru_cache(maxsize=4096)  # many ranks and domains hold equal shares
def _wanted(gate: Gate, groups: tuple[tuple[tuple[float, int], ...], ...]) -> float:
    everything = tuple(((0.0, gate.experts // gate.groups),) for _ in groups)
    return 1 - _missed(gate, groups) / _missed(gate, everything)


@lru_cache(maxsize=4096)
def _missed(gate: Gate, groups: tuple[tuple[tuple[float, int], ...], ...]) -> float:
    """Return the sum, over all choices of groups and of experts in them, of the products of 1 - share."""
    # ways[j, k]: the sum over choices of j groups and k experts.
    ways = np.zeros((gate.topk_groups + 1, gate.topk + 1))
    ways[0, 0] = 1
    for group in groups:
        series = np.eye(1, gate.topk + 1)[0]
        for share, count in group:
            power = np.array([comb(count, k) * (1 - share) ** k for k in range(gate.topk + 1)])
            series = np.convolve(series, power)[: gate.topk + 1]
        if gate.groups > 1 and gate.topk >= gate.topk_groups:
            series[0] = 0  # at least one expert of each drawn group is picked
        ways[1:] += np.array([np.convolve(row, series)[: gate.topk + 1] for row in ways[:-1]])
    return float(ways[-1, -1])


def _to_rank_0(gate: Gate, of_ranks: Array, of_domains: Array) -> Spread:
    """Return the routing of tokens that want rank 0 first."""
    own = of_ranks[0] > 0
    local = int(own.sum())
    here = min(local, gate.topk)
    others = gate.experts - local
    ranks, domains, entries = np.zeros(len(of_ranks)), np.zeros(len(of_domains)), np.zeros(len(of_ranks))
    if rest := gate.topk - here:
        left = Gate(others, rest)
        ranks = np.array([wanted(left, shares[~own]) for shares in of_ranks])
        domains = np.array([wanted(left, shares[~own]) for shares in of_domains])
        entries = of_ranks[:, ~own].sum(axis=1) * rest / others
    ranks[0] = domains[0] = 1
    entries[0] = here
    return Spread(ranks, domains, entries)
