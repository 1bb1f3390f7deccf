"""Made-up counters of a job."""

from __future__ import annotations

import torch

from moecomm.observe.stats.counters import JobStats, Stats


def job(
    wait_ns: torch.Tensor, rows: torch.Tensor | None = None, experts: torch.Tensor | None = None, rounds: int = 100
) -> JobStats:
    """A job of these waits `[3, R, R]`.  By default all links carry 1000 rows, and all experts get as many."""
    ranks = wait_ns.shape[1]
    rows = torch.full((ranks, ranks), 1000) if rows is None else rows
    experts = torch.full((2 * ranks,), 1000) if experts is None else experts
    of_rank = experts.chunk(ranks)
    return JobStats.of_ranks(
        [
            Stats(rounds, 0, 0, 0, rows[:, r], rows[r], rows[:, r] * 256, rows[r] * 256, of_rank[r], wait_ns[:, r])
            for r in range(ranks)
        ]
    )


def usual(ranks: int, rounds: int = 100, seed: int = 0) -> torch.Tensor:
    """Waits of a healthy job: 2 to 8 us a round, and none of a rank for itself."""
    g = torch.Generator().manual_seed(seed)
    waits = torch.randint(2_000 * rounds, 8_000 * rounds, (3, ranks, ranks), generator=g)
    for phase in waits:
        phase.fill_diagonal_(0)
    return waits
