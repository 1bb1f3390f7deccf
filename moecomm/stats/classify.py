"""Words for the counters of a job: which rank computes slowly, which link is slow, which expert is hot.

A rank that computes slowly is late to every round, so all others wait for its round header, and it waits for nobody.  A
slow link shows in one pair: its header is there, and its rows are not.  A hot expert has more rows than the others.

All three compare with the median, which one outlier does not move.  The thresholds, and why:

* SLOW_RANK: the least that another rank waits for it is 3 times what ranks usually wait for each other.  DeepXTrace
  takes 3 for a rank, too.  The least, because a rank for which one peer does not wait is not the one that all wait for.
* SLOW_LINK: 5 times the usual wait for rows (DeepXTrace's factor for one pair), and 3 times what the same rank waits
  for other peers, and what other ranks wait for the same peer: else it is the rank that is slow, not the link.
* FLOOR_NS: 10 us a round.  Below, a wait is no longer than the launch of a kernel and a link's latency.
* HOT_EXPERT: twice the mean.  Up to there a capacity factor in use (1 to 2) has room.  And 6 standard deviations of
  random routing (the square root of the mean), so that few rows are not taken for many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from moecomm.stats.counters import WAITS, JobStats

SLOW_RANK, SLOW_LINK, SLOW_LINK_BESIDE, FLOOR_NS = 3.0, 5.0, 3.0, 10_000
HOT_EXPERT, DEVIATIONS = 2.0, 6.0
_MORE_ROWS = 1.5  # times the mean: rows that explain a wait
_MOST_EXPERTS, _MOST_LINKS = 4, 8  # that are looked at, from the top

Kind = Literal["slow rank", "slow sender", "slow receiver", "slow link", "hot expert"]


@dataclass(frozen=True)
class Finding:
    """One thing that stands out.

    Attributes:
        kind: "slow rank": computes slowly.  "slow sender", "slow receiver": all links from it, or to it.
        where: a rank; of a link: from and to; of "hot expert": the expert.
        factor: how many times the usual wait, or the mean rows.
        text: a sentence.
    """

    kind: Kind
    where: tuple[int, ...]
    factor: float
    text: str


def classify(job: JobStats) -> list[Finding]:
    """Return what stands out, the longest waits first; [] if nothing does."""
    rounds = max(1, int(job.rounds.max())) if job.rounds.numel() else 1
    waits = job.wait_ns.double() / rounds  # of a round
    found = _slow_ranks(job, waits[WAITS.index("header")])
    return found + _slow_links(job, waits[1:].sum(dim=0)) + _hot_experts(job)


def _slow_ranks(job: JobStats, waits: torch.Tensor) -> list[Finding]:
    ranks = len(waits)
    if ranks < 2:
        return []
    columns = _without_diagonal(waits.T)  # [peer, those that wait for it]
    least, found = columns.min(dim=1).values, []
    for rank in least.argsort(descending=True).tolist():
        usual = float(columns[torch.arange(ranks) != rank].median())
        if least[rank] < FLOOR_NS or least[rank] < SLOW_RANK * usual:
            continue
        others = "all other ranks wait" if ranks > 2 else "the other rank waits"
        text = f"rank {rank} computes slowly: {others} for it, {_shown(float(columns[rank].median()))} a round"
        mean = float(job.rows.sum(dim=0).double().mean())
        if (rows := float(job.rows[:, rank].sum())) >= _MORE_ROWS * mean > 0:
            text += f"; it gets {rows / mean:.1f} times the mean rows"
        found.append(Finding("slow rank", (rank,), float(least[rank]) / max(usual, 1.0), text))
    return found


def _slow_links(job: JobStats, waits: torch.Tensor) -> list[Finding]:
    """`waits`: for rows, [rank that waits, peer]: rows of the link from peer to rank."""
    ranks = len(waits)
    if ranks < 2:
        return []
    if ranks > 2 and (found := _slow_ends(waits)):
        return found
    found = []
    for at in waits.flatten().argsort(descending=True)[:_MOST_LINKS].tolist():
        to, source = divmod(at, ranks)
        wait = float(waits[to, source])
        if to == source or wait < FLOOR_NS:
            continue
        others = torch.ones(ranks, ranks, dtype=torch.bool).fill_diagonal_(False)
        others[to, source] = False
        usual = float(waits[others].median()) if others.any() else 0.0
        beside = [waits[to][others[to]], waits[:, source][others[:, source]]]
        most = max((float(line.median()) for line in beside if line.numel()), default=0.0)
        if wait < SLOW_LINK * usual or wait < SLOW_LINK_BESIDE * most:
            continue
        text = f"the link from rank {source} to rank {to} is slow: rank {to} waits {_shown(wait)} a round for its rows"
        rows = job.rows.double()
        mean = float(rows[others.T].mean()) if others.any() else 0.0
        if float(rows[source, to]) >= _MORE_ROWS * mean > 0:
            text += f"; it carries {float(rows[source, to]) / mean:.1f} times the mean rows"
        found.append(Finding("slow link", (source, to), wait / max(usual, 1.0), text))
    return found


def _slow_ends(waits: torch.Tensor) -> list[Finding]:
    """Look for a rank all of whose links in one direction are slow."""
    found = []
    words: tuple[tuple[Kind, torch.Tensor, str], ...] = (
        ("slow sender", waits.T, "rank {} sends slowly: all other ranks wait for its rows, {} a round"),
        ("slow receiver", waits, "rank {} receives slowly: it waits for the rows of all other ranks, {} a round"),
    )
    for kind, matrix, text in words:
        lines = _without_diagonal(matrix)
        for rank in range(len(lines)):
            least, usual = float(lines[rank].min()), float(lines[torch.arange(len(lines)) != rank].median())
            if least >= FLOOR_NS and least >= SLOW_RANK * usual:
                said = text.format(rank, _shown(float(lines[rank].median())))
                found.append(Finding(kind, (rank,), least / max(usual, 1.0), said))
    return found


def _hot_experts(job: JobStats) -> list[Finding]:
    rows = job.rows_per_expert.double()
    if len(rows) < 2 or (mean := float(rows.mean())) == 0:
        return []
    limit = max(HOT_EXPERT * mean, mean + DEVIATIONS * mean**0.5)
    found = []
    for expert in rows.argsort(descending=True).tolist()[:_MOST_EXPERTS]:
        if rows[expert] >= limit:
            factor = float(rows[expert]) / mean
            share = float(rows[expert] / rows.sum())
            text = f"expert {expert} is hot: {factor:.1f} times the mean rows, {share:.0%} of all"
            found.append(Finding("hot expert", (expert,), factor, text))
    return found


def _without_diagonal(square: torch.Tensor) -> torch.Tensor:
    """`[R, R - 1]`: each row without the rank itself."""
    ranks = len(square)
    return square[~torch.eye(ranks, dtype=torch.bool)].view(ranks, ranks - 1)


def _shown(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e6 else f"{ns / 1e3:.0f} us"
