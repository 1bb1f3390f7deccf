"""python -m tests.kill_plans PLANS [--first SEED] [--json FILE]: CPU ranks that are killed at random, and those left.

A plan starts 2 to 6 ranks and kills them in steps of 1 or more until some are left.  Of a step, the first rank dies in
a round, the others up to 30 ms later, so also while the survivors notice, agree, or open their windows.  After each
step the survivors shrink and make 100 rounds, whose rows and sums they compare with those of the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import moecomm
from moecomm.bench import results

from .conftest import Ranks

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 24, "topk": 3, "max_tokens": 8, "backend": "host"}
EXACT = 100  # rounds after each step
LATE_S, FIRST_S = 0.03, 0.005
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class Plan(NamedTuple):
    """`steps`: the ranks that each step kills, by their first numbers."""

    ranks: int
    steps: list[list[int]]

    @property
    def survivors(self) -> set[int]:
        return set(range(self.ranks)) - {rank for step in self.steps for rank in step}

    def due(self, alive: set[int]) -> list[int]:
        """The step after those whose ranks are all gone."""
        return next((step for step in self.steps if alive & set(step)), [])


class Shrinking(NamedTuple):
    """A call of shrink(): how long it took, and who was lost, by the first numbers."""

    seconds: float
    lost: list[int]


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    ranks = draw.randint(2, 6)
    left, steps = list(range(ranks)), []
    while len(left) > 1 and (not steps or draw.random() < 0.6):
        step = draw.sample(left, draw.randint(1, len(left) - 1))
        left = [rank for rank in left if rank not in step]
        steps.append(step)
    return Plan(ranks, steps)


def tokens_of(rank: int, number: int) -> torch.Tensor:
    """Rows of small whole numbers, so that sums are exact; the first two columns say which token it is."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randint(-8, 9, (1 + (rank + number) % SIZES["max_tokens"], SIZES["hidden"]), generator=generator)
    x[:, 0], x[:, 1] = rank, torch.arange(len(x))
    return x.bfloat16()


def exact_round(buffer: moecomm.Buffer, number: int) -> None:
    """Compare a dispatch and a combine with the tokens of all ranks."""
    x = tokens_of(buffer.rank, number)
    ids = torch.rand(len(x), SIZES["num_experts"], generator=torch.Generator().manual_seed(number)).argsort(dim=1)
    routed = buffer.dispatch(x, ids[:, : SIZES["topk"]])
    assert routed.src is not None
    for row, (rank, token) in zip(routed.x, routed.src[:, :2].tolist(), strict=True):
        assert torch.equal(row, tokens_of(rank, number)[token])
    assert torch.equal(buffer.combine(routed.x, routed.handle, wire="exact"), SIZES["topk"] * x)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def survive(rank: int, group: Any, plan: Plan, seed: int) -> tuple[set[int], list[Shrinking], int]:
    """Run a plan on one rank; return those that are left, what shrinking took, and descriptors that leaked."""
    draw = random.Random(seed * 64 + rank)
    alive, shrinkings, number = list(range(plan.ranks)), [], 0
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20)
    exact_round(buffer, 0)
    before = descriptors()
    while not (set(alive) == plan.survivors and number == EXACT):
        if number == (EXACT if shrinkings else 3) and rank in (step := plan.due(set(alive))):
            threading.Timer(draw.uniform(0, FIRST_S if rank == step[0] else LATE_S), _die).start()
        try:
            exact_round(buffer, number)
            number += 1
        except moecomm.RoundFailed:
            begin = time.monotonic()
            found = buffer.shrink()
            shrinkings.append(Shrinking(time.monotonic() - begin, [alive[place] for place in found.lost]))
            alive, number = [alive[place] for place in found.ranks], 0
            assert buffer.num_ranks == len(alive) and alive[buffer.rank] == rank
    # The pages and the watch of each rank that is gone have been closed.
    leaked = max(0, descriptors() - before)
    buffer.close()
    return set(alive), shrinkings, leaked


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check(ranks: Ranks, seed: int) -> list[Shrinking]:
    """Run a plan; return what shrinking took on the ranks that are left."""
    plan = plan_of(seed)
    ranks.start(plan.ranks, survive, plan, seed)
    found = ranks.results(len(plan.survivors), timeout_s=60)
    assert found.keys() == plan.survivors, f"seed {seed}: {plan}"
    took = []
    for rank, result in found.items():
        assert not isinstance(result, BaseException), f"seed {seed}, rank {rank} of {plan}: {result!r}"
        alive, shrinkings, leaked = result
        assert alive == plan.survivors
        assert sorted(lost for one in shrinkings for lost in one.lost) == sorted(set(range(plan.ranks)) - alive)
        assert leaked == 0, f"seed {seed}, rank {rank}: {leaked} descriptors"
        took += shrinkings
    return took


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.kill_plans", description=__doc__)
    parser.add_argument("plans", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first plan")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds: list[float] = []
    kills = shrinks = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.first, given.first + given.plans):
            (Path(folder) / str(seed)).mkdir()
            took = check(Ranks(Path(folder) / str(seed), "fork"), seed)
            plan = plan_of(seed)
            kills += plan.ranks - len(plan.survivors)
            shrinks += len(took)
            seconds += [one.seconds for one in took]
    ms = sorted(1e3 * one for one in seconds)
    row = {
        "kind": "killed CPU ranks, agreed membership and exact rounds",
        "plans": given.plans,
        "kills": kills,
        "shrinks": shrinks,
        "shrink_ms": {name: round(ms[int(share * (len(ms) - 1))], 2) for name, share in PERCENTILES.items()},
    }
    print(json.dumps(row, indent=1))
    if given.json:
        results.write(given.json, {"rows": [row]})


if __name__ == "__main__":
    main()
