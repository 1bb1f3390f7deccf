"""python -m tests.kill_plans PLANS [--first SEED] [--gpus]: ranks that are killed and replaced at random.

A plan has 2 to 6 ranks.  It kills some of them, once or several times, until new processes take the places of all
that are gone, and does that again.  Of the ranks that are killed at a time, the first dies in a round, the others up to
30 ms later, or up to 30 ms after a survivor has called shrink(): so also while the survivors notice, agree, or open
their windows.  In some plans one more is killed while the new ones join: one of them, or of the others.

Survivors must raise PeerLost, shrink, and make 100 rounds, whose rows and sums they compare with those of the tokens;
so must all ranks after others have joined.  How soon is measured: no time may be near the deadline, and on CPUs medians
have bounds of their own (SOON_MS).  On CPUs, three of four plans verify each round, each second or each third, so that
ranks are also killed in rounds that verify other rounds.  GPUs are shared by ranks if there are few.  With
CUDA_DEVICE_MAX_CONNECTIONS=32 one GPU has no room for the contexts of four plans.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import moecomm
from moecomm_bench import results

from .percentiles import percentiles
from .rejoin import Job, Member
from .supervisor import Supervisor

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 24, "topk": 3, "max_tokens": 8}
EXACT = 100  # rounds after each change of ranks
MOST_RANKS = 6
TIMEOUT_S = 20
SPARES = 3  # of a plan on GPUs; more delay each other: the driver of a host makes contexts one after the other
# Bounds of medians: of a survivor's PeerLost and shrink(), and of ranks that go on with one that joins.  At least four
# times the medians of bench/results/kill-plans-cpu.json, and twice those of two cores with six busy processes beside.
SOON_MS = {"noticed": 300, "shrink": 300, "first_round_after_shrink": 300, "grow": 700, "join": 1500}
COUNTS = (
    "plans",
    "kills",
    "kills while others shrink",
    "kills while others join",
    "times several were killed",
    "times rank 0 was killed",
    "times one was left",
)
LATE_S, FIRST_S = 0.03, 0.005


class Step(NamedTuple):
    """Attributes:
    kills: how many ranks are killed, one time after the other.
    joining: who else is killed while new processes join: "old", "new", or "" for nobody.
    """

    kills: list[int]
    joining: str


class Plan(NamedTuple):
    """`ranks`: when all are there.  `steps`: new processes join after each."""

    ranks: int
    steps: list[Step]

    @property
    def kills(self) -> int:
        """Return how many processes the plan kills."""
        return sum(sum(step.kills) + bool(step.joining) for step in self.steps)

    @property
    def processes(self) -> int:
        """Return how many the plan takes at least, each replacement counted."""
        return self.ranks + self.kills


def plan_of(seed: int, most_ranks: int = MOST_RANKS) -> Plan:
    draw = random.Random(seed)
    ranks, steps = draw.randint(2, most_ranks), []
    while not steps or (len(steps) < 3 and draw.random() < 0.5):
        left, kills = ranks, []
        while left > 1 and (not kills or draw.random() < 0.4):
            kills.append(draw.randint(1, left - 1))
            left -= kills[-1]
        steps.append(Step(kills, draw.choice(["", "old", "new"] if left > 1 else ["", "new"])))
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
    routed = buffer.dispatch(x.to(buffer.device), ids[:, : SIZES["topk"]].to(buffer.device), sync=True)
    assert routed.src is not None
    sent = [tokens_of(rank, number) for rank in range(buffer.num_ranks)]
    rank, token = routed.src[:, :2].cpu().long().unbind(dim=1)
    first = torch.tensor([0, *itertools.accumulate(map(len, sent))])
    assert torch.equal(routed.x.cpu(), torch.cat(sent)[first[rank] + token])
    out = buffer.combine(routed.x, routed.handle, wire="exact")
    buffer.check()
    assert torch.equal(out.cpu(), SIZES["topk"] * x)


def count_descriptors(member: Member) -> None:
    """Note how many this process has, if all ranks live: it closes the descriptor of a process that has ended."""
    if member.number == EXACT // 2:
        gc.collect()  # errors refer to frames, which refer to errors
        count = len(os.listdir("/proc/self/fd"))
        if not any(member.job.get("died_ns", other) for other in member.members):
            member.job.note(member.process, kind="rest", ranks=len(member.members), descriptors=count)


def member_of(job: Job, process: int, first_gpu: int = 0) -> Member:
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device((first_gpu + process) % gpus)
        torch.cuda.synchronize()  # which makes the context
    return Member(job, process, exact_round, count_descriptors)


def compile_for(ranks: int) -> None:
    """Compile the kernels of these rounds, which are to be in the cache on disk when ranks shrink and grow."""
    with moecomm.Buffer("self", **SIZES, backend="lsa") as buffer:
        exact_round(buffer, 0)
        buffer.compile_for(ranks)


class Found:
    """Results of plans: numbers of kills and of calls, and how long they took, in ms.  `kind`: of ranks."""

    def __init__(self, kind: str = "CPU") -> None:
        self.kind = kind
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self.failed: list[int] = []  # seeds
        self.ms: dict[str, list[float]] = {name: [] for name in SOON_MS}

    def add(self, other: Found) -> None:
        """Add the results of other plans."""
        self.counts.update(other.counts)
        self.failed += other.failed
        for name, ms in other.ms.items():
            self.ms[name] += ms

    def check_soon(self) -> None:
        """Compare times with the bounds, if no plan has failed.  Under load a few calls take long, but none that ends
        by a signal of a process takes as long as one that waits for the deadline.
        """
        assert not self.failed, f"plans with these seeds have failed: {self.failed}"
        for name, ms in self.ms.items():
            assert max(ms, default=0) < 1e3 * TIMEOUT_S / 2, f"{name}: {ms}"
            assert not ms or self.kind != "CPU" or statistics.median_low(ms) < SOON_MS[name], f"{name}: {ms}"

    def row(self) -> dict[str, Any]:
        return {
            "kind": f"killed and replaced {self.kind} ranks, agreed membership and exact rounds",
            **self.counts,
            "failed": len(self.failed),
            "shrinks": len(self.ms["shrink"]),
            "grows": len(self.ms["grow"]),
            **{f"{name}_ms": percentiles(ms) for name, ms in self.ms.items()},
        }


def check(folder: Path, seed: int, kind: str = "CPU", most_ranks: int = MOST_RANKS, first_gpu: int = 0) -> Found:
    """Run a plan in an empty folder, check what its processes have noted, and return it.

    Args:
        folder: for this plan.
        seed: of the plan.
        kind: of ranks.
        most_ranks: of a plan.
        first_gpu: of process 0, where ranks have GPUs; the next process has the next one.
    """
    plan, draw, found = plan_of(seed, most_ranks), random.Random(seed), Found(kind)
    sizes = {**SIZES, "backend": "host" if kind == "CPU" else "lsa", "timeout_s": TIMEOUT_S}
    sizes["verify_every"] = seed % 4 if kind == "CPU" else 0
    member = partial(member_of, first_gpu=first_gpu)
    spares = 0 if kind == "CPU" else SPARES
    with Supervisor(folder, member, plan.ranks, draw, spares=spares, expected=plan.processes) as job:
        job.fill(sizes)
        job.wait(lambda: job.full(EXACT))
        for step in plan.steps:
            for kills in step.kills:
                found.counts.update(kill(job, kills, draw))
            join(job, sizes, step.joining, draw)
        job.stop()
        for process in range(job.started):
            check_events(job, process, found, f"seed {seed}, process {process} of {plan}")
    joining = sum(bool(step.joining) for step in plan.steps)
    found.counts.update({"plans": 1, "kills": plan.kills, "kills while others join": joining})
    return found


def kill(job: Supervisor, kills: int, draw: random.Random) -> dict[str, int]:
    """Kill some ranks, and wait until the others have gone on; return what is counted of it."""
    members, while_shrinking = job.members, 0
    invited = job.job.invitation(job.job.get("invited")).members  # by rank; shrink() keeps their order
    first = next(one for one in invited if one in members)
    victims = draw.sample(members, kills)
    lives = {one: job.job.get("life", one) for one in members if one not in victims}
    for number, victim in enumerate(victims):
        if number and draw.random() < 0.5:
            job.wait(lambda: any(job.job.get("shrinking", one) > life for one, life in lives.items()))
        time.sleep(draw.uniform(0, LATE_S if number else FIRST_S))
        while_shrinking += any(job.job.get("shrinking", one) > job.job.get("life", one) for one in lives)
        job.kill(victim)
    left = job.members
    job.wait(lambda: job.made(left, EXACT))
    return {
        "kills while others shrink": while_shrinking,
        "times several were killed": kills > 1,
        "times rank 0 was killed": first in victims,
        "times one was left": len(left) == 1,
    }


def join(job: Supervisor, sizes: dict[str, Any], joining: str, draw: random.Random) -> None:
    """Replace those that are gone, and perhaps kill one more meanwhile."""
    old, new = job.members, job.fill(sizes)
    if joining:
        job.wait(lambda: all(job.job.get("waits_for", one) for one in new))
        time.sleep(draw.uniform(0, LATE_S))
        job.kill(draw.choice(new if joining == "new" else old))
    while True:
        job.wait(lambda: job.full(EXACT) or len(job.alive) < job.ranks)
        if len(job.alive) == job.ranks:
            return
        job.fill(sizes)


def check_events(job: Supervisor, process: int, found: Found, said: str) -> None:
    descriptors: dict[int, set[int]] = {}
    for event in job.job.events(process):
        kind = event["kind"]
        if kind == "rest":
            descriptors.setdefault(event["ranks"], set()).add(event["descriptors"])
        elif kind == "shrink":
            assert event["error"] == "PeerLost" and event["peer"] in job.killed, f"{said}: {event}"
            assert set(event["lost"]) <= job.killed, f"{said}: {event}"
            found.ms["noticed"].append(event["noticed_ms"])
        elif kind == "not grown":  # Timeout: a process that was killed before it came
            assert event["error"] in ("PeerLost", "Timeout"), f"{said}: {event}"
        if kind in found.ms:
            found.ms[kind].append(event["ms"])
    assert all(len(counts) == 1 for counts in descriptors.values()), f"{said}: descriptors {descriptors}"


def one_after_the_other(first: int, given: argparse.Namespace) -> Found:
    """Run every `jobs`-th plan from the one with this seed, until time is up."""
    found, begin = Found("GPU" if given.gpus else "CPU"), time.monotonic()
    gpu = (first - given.first) * torch.cuda.device_count() // given.jobs  # so that plans at a time share few
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, given.first + given.plans, given.jobs):
            if time.monotonic() - begin > 60 * given.minutes:
                break
            (Path(folder) / str(seed)).mkdir()
            try:
                found.add(check(Path(folder) / str(seed), seed, found.kind, given.most_ranks, gpu))
            except AssertionError as error:
                found.failed.append(seed)
                print(f"the plan with seed {seed} has failed: {error}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.kill_plans", description=__doc__)
    parser.add_argument("plans", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first plan")
    parser.add_argument("--gpus", action="store_true", help="ranks on the GPUs of this machine")
    parser.add_argument("--most-ranks", type=int, default=MOST_RANKS)
    parser.add_argument("--jobs", type=int, default=1, help="plans at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no plan after so long")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fork, found = multiprocessing.get_context("fork"), Found("GPU" if given.gpus else "CPU")
    if given.gpus:
        with fork.Pool(given.most_ranks) as pool:
            pool.map(compile_for, range(1, given.most_ranks + 1), chunksize=1)
    with ProcessPoolExecutor(given.jobs, fork) as executor:
        firsts = range(given.first, given.first + given.jobs)
        for part in executor.map(one_after_the_other, firsts, [given] * given.jobs):
            found.add(part)
    row = found.row()
    print(json.dumps(row, indent=1))
    if given.json:
        results.write(given.json, {"rows": [row]})
    found.check_soon()


if __name__ == "__main__":
    main()
