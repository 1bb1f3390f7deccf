"""Words for the counters of a job: which rank comes late, which link is slow, which expert is hot.

A rank that comes late to rounds, because it computes slowly or its cores are busy, makes all others wait for its round
header.  A slow link shows in one pair of ranks: the header has arrived, and the rows have not.  A hot expert has
more rows than other experts.

Waits are compared with the median, which one outlier does not move.  The thresholds and their reasons:

* SLOW_RANK: the least that another rank waits for it is 3 times what ranks usually wait for each other.  DeepXTrace
  takes 3 for a rank, too.  The least, because a rank for which one peer does not wait is not the one that all wait for.
* SLOW_LINK: 5 times the usual wait for rows (DeepXTrace's factor for one pair), and 3 times what the same rank waits
  for other peers, and what other ranks wait for the same peer: else it is the rank that is slow, not the link.
* FLOOR_NS: 10 us a round.  Below, a wait is no longer than the launch of a kernel and a link's latency.
* STALL_NS and DEVIATIONS: counters are sums, in which one long wait looks like many short ones.  A healthy rank makes
  others wait when its thread loses its core: for 10 ms, about three time slices of Linux.  The sum of n such stalls
  varies by the square root of n.  A wait must exceed the usual one by 6 of these deviations, 60 ms at least, so in few
  rounds little is named.  In thousands of rounds FLOOR_NS is the higher threshold.  For rows, usual is also what ranks
  wait for each other's headers: where ranks run unevenly, rows come unevenly.
* SHARE: a tenth of the longest wait of a rank.  A shorter wait does not hold up the job, and threads that have
  waited long for one rank do not all wake at once.

Each cause is named once.  A rank that gets its rows late comes late to the next round, so the time by which it waits
longer for rows than other ranks do is subtracted from its lateness.  A rank that comes late waits for the rows of all
other ranks, which begin to send when its header arrives; its own rows may be late for the same cause.  So its links are
named only if their waits exceed its lateness.

A hot expert has HOT_EXPERT times the mean, twice: up to that, usual capacity factors (1 to 2) have room.  It also
exceeds the mean by 6 standard deviations of random routing (the square root of the mean), so that chance in few rows
names no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from moecomm.observe.stats.counters import WAITS, JobStats

SLOW_RANK, SLOW_LINK, SLOW_LINK_BESIDE, HOT_EXPERT = 3.0, 5.0, 3.0, 2.0
FLOOR_NS, STALL_NS, DEVIATIONS, SHARE = 10_000, 10_000_000, 6.0, 0.1
_MORE_ROWS = 1.5  # times the mean: rows that explain a wait
_MOST_EXPERTS, _MOST_LINKS = 4, 8  # that are looked at, from the top

Kind = Literal["slow rank", "slow sender", "slow receiver", "slow link", "hot expert"]


@dataclass(frozen=True)
class Finding:
    """Slow rank, slow link or hot expert that stands out.

    Attributes:
        kind: "slow rank": comes late to rounds.  "slow sender", "slow receiver": all links from it, or to it.
        where: a rank; of a link: from and to; of "hot expert": the expert.
        factor: how many times the usual wait, or the mean rows.
        text: a sentence.
    """

    kind: Kind
    where: tuple[int, ...]
    factor: float
    text: str


class _Waits(NamedTuple):
    """Waits of a job, in ns over all rounds.

    Attributes:
        rounds: number of rounds of the rank with the most.
        header, rows: [rank that waits, peer]: for round headers, and for rows.
        longest: the longest wait of a rank, for headers and rows together.
        usual: the median wait for a header.
    """

    rounds: int
    header: torch.Tensor
    rows: torch.Tensor
    longest: float
    usual: float

    @classmethod
    def of(cls, job: JobStats) -> _Waits:
        """Read the counters of two ranks or more."""
        waits = job.wait_ns.double()
        header, rows = waits[WAITS.index("header")], waits[1:].sum(dim=0)
        longest = float((header.amax(dim=1) + rows.amax(dim=1)).max())
        rounds = max(1, int(job.rounds.max()))
        return cls(rounds, header, rows, longest, float(_without_diagonal(header).median()))

    def matters(self, wait: float, usual: float) -> bool:
        """Return whether a wait is more than noise, and long for this job."""
        noise = DEVIATIONS * (max(usual, STALL_NS) * STALL_NS) ** 0.5
        return wait - usual >= noise and wait >= max(FLOOR_NS * self.rounds, SHARE * self.longest)

    def shown(self, wait: float) -> str:
        ns = wait / self.rounds
        return f"{ns / 1e6:.1f} ms a round" if ns >= 1e6 else f"{ns / 1e3:.0f} us a round"


def classify(job: JobStats) -> list[Finding]:
    """Return the findings, the longest waits first."""
    found: list[Finding] = []
    if len(job.rounds) > 1:
        waits = _Waits.of(job)
        late, found = _slow_ranks(job, waits)
        found += _slow_ends(waits, late) or _slow_links(job, waits, late)
    return found + _hot_experts(job)


def _slow_ranks(job: JobStats, waits: _Waits) -> tuple[torch.Tensor, list[Finding]]:
    """Look for ranks that come late; also return the lateness of each rank, 0 for ranks in time."""
    ranks = len(waits.header)
    columns = _without_diagonal(waits.header.T)  # [peer, rank that waits for it]
    own = waits.rows.amax(dim=1)
    least = (columns.amin(dim=1) - (own - own.median()).clamp(min=0)).clamp(min=0)
    late, found = torch.zeros_like(least), []
    for rank in least.argsort(descending=True).tolist():
        wait, usual = float(least[rank]), float(columns[torch.arange(ranks) != rank].median())
        if wait < SLOW_RANK * usual or not waits.matters(wait, usual):
            continue
        late[rank] = wait
        others = "all other ranks wait" if ranks > 2 else "the other rank waits"
        text = f"rank {rank} comes late: {others} for it, {waits.shown(float(columns[rank].median()))}"
        mean = float(job.rows.sum(dim=0).double().mean())
        if (rows := float(job.rows[:, rank].sum())) >= _MORE_ROWS * mean > 0:
            text += f"; it gets {rows / mean:.1f} times the mean rows"
        found.append(Finding("slow rank", (rank,), wait / max(usual, 1.0), text))
    return late, found


def _slow_links(job: JobStats, waits: _Waits, late: torch.Tensor) -> list[Finding]:
    """Look for single links, from a peer to the rank that waits for its rows."""
    ranks, found = len(waits.rows), []
    for at in waits.rows.flatten().argsort(descending=True)[:_MOST_LINKS].tolist():
        to, source = divmod(at, ranks)
        wait = float(waits.rows[to, source])
        if to == source or wait < float(late[[to, source]].max()):
            continue
        others = torch.ones(ranks, ranks, dtype=torch.bool).fill_diagonal_(False)
        others[to, source] = False
        usual = float(waits.rows[others].median())
        beside = [waits.rows[to][others[to]], waits.rows[:, source][others[:, source]]]
        most = max((float(line.median()) for line in beside if line.numel()), default=0.0)
        if wait < max(SLOW_LINK * usual, SLOW_LINK_BESIDE * most) or not waits.matters(wait, max(usual, waits.usual)):
            continue
        text = f"the link from rank {source} to rank {to} is slow: rank {to} waits {waits.shown(wait)} for its rows"
        rows = job.rows.double()
        mean = float(rows[others.T].mean())
        if float(rows[source, to]) >= _MORE_ROWS * mean > 0:
            text += f"; it carries {float(rows[source, to]) / mean:.1f} times the mean rows"
        found.append(Finding("slow link", (source, to), wait / max(usual, 1.0), text))
    return found


def _slow_ends(waits: _Waits, late: torch.Tensor) -> list[Finding]:
    """Look for a rank all of whose links in one direction are slow."""
    if len(late) == 2:  # there is one link
        return []
    found = []
    words: tuple[tuple[Kind, torch.Tensor, str], ...] = (
        ("slow sender", waits.rows.T, "rank {} sends slowly: all other ranks wait for its rows, {}"),
        ("slow receiver", waits.rows, "rank {} receives slowly: it waits for the rows of all other ranks, {}"),
    )
    for kind, matrix, text in words:
        lines = _without_diagonal(matrix)
        for rank in range(len(lines)):
            wait, usual = float(lines[rank].min()), float(lines[torch.arange(len(lines)) != rank].median())
            if wait < max(float(late[rank]), SLOW_RANK * usual) or not waits.matters(wait, max(usual, waits.usual)):
                continue
            said = text.format(rank, waits.shown(float(lines[rank].median())))
            found.append(Finding(kind, (rank,), wait / max(usual, 1.0), said))
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
