"""python -m tests.call_plans PLANS [--first SEED]: random membership calls of CPU ranks, beside kills and stops.

A plan has 4 to 6 ranks, each a process, and some steps.  In a step all ranks make the same call: rounds, mask() and
unmask(), shrink(), grow(), release_memory() and restore().  In most steps something happens to one rank meanwhile: it
is killed, is stopped for a while, calls abort(), closes its Buffer, or makes another call than the rest.

Each rank must end each call in success or in an error of moecomm, in time.  After an error the ranks that are left call
shrink(), agree on the next step, and go on.  Each round is exact: its rows, counts and sums are compared with those
of the tokens of the ranks that take part.  Rounds repeat dispatches, and go in chunks where there is little room.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import multiprocessing
import os
import random
import select
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import moecomm
from moecomm.base.experts import experts_of

TIMEOUT_S = 0.5
LATEST_S = 0.02  # after the begin of a call, for what happens to a rank
LONGEST_STOP_S = 2.5 * TIMEOUT_S
LIMIT_S = 90.0  # for a plan
TRIES = 8  # of a rank to go on after an error
MOST, TOPK, HIDDEN = 8, 3, 64
CALLS = ("rounds", "mask", "shrink", "shrink, ids kept", "grow", "release")
HAPPENS = ("", "kill", "stop", "abort", "close", "another call")


class Step(NamedTuple):
    """Attributes:
    call: of all ranks.
    happens: to one of them.
    victim: its process.
    another: the call that it makes, if it makes another.
    targets: processes that mask() masks, of which unmask() takes in the first.
    late_s: when it happens, after the call has begun.
    """

    call: str
    happens: str
    victim: int
    another: str
    targets: list[int]
    late_s: float


class Plan(NamedTuple):
    """`sizes`: of the Buffer."""

    ranks: int
    sizes: dict[str, Any]
    steps: list[Step]


def plan_of(seed: int) -> Plan:
    """Make the plan with this seed."""
    draw = random.Random(seed)
    ranks = draw.randint(4, 6)
    sizes = {
        "num_experts": draw.choice([13, 24]),
        "dtype": draw.choice([torch.float32, torch.bfloat16]),
        "capacity_factor": draw.choice([None, 0.5]),
        "verify_every": draw.randint(0, 3),
    }
    steps = [
        Step(
            draw.choice(CALLS),
            draw.choice(HAPPENS),
            draw.randrange(ranks),
            draw.choice(CALLS),
            draw.sample(range(ranks), draw.randint(1, 2)),
            draw.uniform(0, LATEST_S),
        )
        for _ in range(draw.randint(3, 6))
    ]
    return Plan(ranks, sizes, steps)


class Left(Exception):
    """This rank takes no part any more, by what the plan says or the others have decided."""


class Rank:
    """A process of a plan.

    Args:
        plan: to run.
        process: number of this one.
        store: that all of them see.
        seed: of the plan.
    """

    def __init__(self, plan: Plan, process: int, store: Any, seed: int) -> None:
        self._plan, self._process, self._store = plan, process, store
        self._draw = random.Random(seed * 64 + process)
        self.members = list(range(plan.ranks))  # processes, by rank
        self.errors: Counter[str] = Counter()
        self.rounds = 0  # that were exact
        self._step = self._number = 0
        sizes = {"hidden": HIDDEN, "topk": TOPK, "max_tokens": MOST, "backend": "host", **plan.sizes}
        self.buffer = moecomm.Buffer(self._group("first", self.members), **sizes, timeout_s=20)
        self.buffer.rounds.members = self.buffer.rounds.members._replace(timeout_s=TIMEOUT_S)
        self.buffer.rounds.session.context.timeout_ns = int(TIMEOUT_S * 1e9)

    def run(self) -> str:
        """Make the steps; return how this rank has ended."""
        try:
            while self._step < len(self._plan.steps):
                step = self._plan.steps[self._step]
                try:
                    self._make(step)
                    self._step += 1
                    self._number = 1000 * self._step
                except moecomm.MoecommError as error:
                    self._recover(error)
            self.buffer.close()
        except Left as left:
            return str(left)
        return "ended"

    def _group(self, name: str, members: list[int]) -> dist.ProcessGroup:
        store = dist.PrefixStore(f"{name} of {members}/", self._store)
        return dist.ProcessGroup(store, members.index(self._process), len(members))

    def _make(self, step: Step) -> None:
        call = step.call
        if step.victim == self._process:
            acts: dict[str, Callable[[], None]] = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "abort": self.buffer.abort,
            }
            if step.happens == "close":
                self.buffer.close()
                raise Left("closed")
            if step.happens == "another call":
                call = step.another
            elif step.happens in acts:
                timer = threading.Timer(step.late_s, acts[step.happens])
                timer.daemon = True
                timer.start()
        getattr(self, f"_{call.partition(',')[0]}")(step, call)

    def _rounds(self, step: Step, call: str) -> None:
        for _ in range(4):
            self._exact_round()

    def _mask(self, step: Step, call: str) -> None:
        """Mask a rank or two, make rounds, and take the first in again."""
        ranks = [self.members.index(target) for target in step.targets if target in self.members]
        if not 0 < len(ranks) < len(self.members):
            self._rounds(step, call)  # else a rank that makes this call alone would be a step ahead without an error
            return
        if self.buffer.rank not in ranks:
            self.buffer.mask(ranks)
            for _ in range(2):
                self._exact_round()
        elif self._draw.random() < 0.5:  # notices that it is masked
            with suppress(moecomm.Excluded):
                self._exact_round()
        if self.buffer.rank in ranks[1:]:
            self._step = len(self._plan.steps)
            self.buffer.close()
            raise Left("masked")
        self.buffer.unmask(ranks[:1])
        self._number = 1000 * self._step + 2
        for _ in range(4):
            self._exact_round()

    def _shrink(self, step: Step, call: str) -> None:
        self._take(self.buffer.shrink(keep_ids=call.endswith("ids kept")))
        self._rounds(step, call)

    def _take(self, found: Any) -> None:
        self.members = [self.members[rank] for rank in found.ranks]

    def _grow(self, step: Step, call: str) -> None:
        order = self.members[1:] + self.members[:1]
        self.buffer.grow(self._group(f"step {self._step}", order))
        self.members = order
        self._rounds(step, call)

    def _release(self, step: Step, call: str) -> None:
        self.buffer.release_memory()
        self.buffer.restore()
        self._rounds(step, call)

    def _recover(self, error: moecomm.MoecommError) -> None:
        """Go on with the ranks that are left, after the same step."""
        for _ in range(TRIES):
            self.errors[type(error).__name__] += 1
            if isinstance(error, moecomm.Excluded):
                self.buffer.close()
                raise Left("excluded")
            try:
                self._take(self.buffer.shrink())
                self._step = self._agreed(self._step) + 1
                self._number = 1000 * self._step
                return
            except moecomm.MoecommError as another:
                error = another.with_traceback(None)
        raise AssertionError(f"no way to go on after {TRIES} tries: {error!r}")

    def _agreed(self, step: int) -> int:
        """Return the last step of all ranks, which each tells each by a token for an expert of theirs."""
        owned = [
            list(experts_of(rank, self.buffer.num_experts, self.buffer.num_ranks)) for rank in range(len(self.members))
        ]
        x = torch.full((len(owned), HIDDEN), float(step)).to(self.buffer.dtype)
        ids = torch.tensor([[experts[0], -1, -1] for experts in owned])
        return int(self.buffer.dispatch(x, ids, layout="flat", overflow="error", max_rows=64).x[:, 0].max())

    def _tokens(self, process: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(64 * number + process)
        x = torch.randint(-8, 9, (int(torch.randint(0, MOST + 1, (), generator=g)), HIDDEN), generator=g)
        ids = torch.rand(len(x), self.buffer.num_experts, generator=g).argsort(dim=1)[:, :TOPK]
        return x.to(self.buffer.dtype), ids

    def _exact_round(self) -> None:
        """Dispatch, dispatch other rows by the same handle, and combine."""
        buffer, number = self.buffer, self._number
        self._number += 1
        x, ids = self._tokens(self._process, number)
        routed = buffer.dispatch(x, ids)
        self._check(routed, number, 1)
        if number % 2:
            routed = buffer.dispatch(-x, handle=routed.handle)
            x = -x
            self._check(routed, number, -1)
        out = buffer.combine(routed.x, routed.handle, wire="exact")
        there = torch.isin(ids, torch.tensor(self._there() or [-1]))
        assert torch.equal(out, x * there.sum(dim=1, keepdim=True)), "sums differ"
        self.rounds += 1

    def _there(self) -> list[int]:
        """Experts, in the callers' numbers, of the ranks that take part."""
        rounds = self.buffer.rounds
        masked = {e for r in rounds.masked for e in experts_of(r, rounds.num_experts, rounds.num_ranks)}
        names = range(rounds.num_experts) if rounds.experts.ids is None else rounds.experts.ids.kept
        return [name for place, name in enumerate(names) if place not in masked]

    def _check(self, routed: moecomm.Routed, number: int, sign: int) -> None:
        """Compare rows and counts with the tokens of all ranks that take part."""
        sent = [
            (sign * x, ids)
            for rank, process in enumerate(self.members)
            if rank not in self.buffer.masked
            for x, ids in [self._tokens(process, number)]
        ]
        rows, counts = [], []
        for expert in self.buffer.local_experts:
            mine = [x[(ids == expert).any(dim=1)] for x, ids in sent]
            rows += mine
            counts.append(sum(map(len, mine)))
        found = routed.tokens_per_expert.tolist()
        assert found == counts, f"counts are {found}, not {counts}, in round {number} ({'repeat' if sign < 0 else ''})"
        assert torch.equal(routed.x, torch.cat(rows)), f"rows differ in round {number}"


def main_of(plan: Plan, process: int, port: memoryview, seed: int) -> dict[str, Any]:
    """Run a rank in this process; return what becomes of it."""
    logging.getLogger("moecomm").setLevel(logging.ERROR)
    rank = None
    try:
        while port[0] == 0:
            time.sleep(1e-3)
        rank = Rank(plan, process, dist.TCPStore("127.0.0.1", port[0], is_master=False), seed)
        return {"end": rank.run(), "errors": rank.errors, "rounds": rank.rounds}
    except BaseException:  # noqa: BLE001 - the parent reports it
        where = "" if rank is None else f"in step {rank._step}, ranks {rank.members}: "
        return {"end": "failed", "text": where + traceback.format_exc()}


def check(seed: int) -> Counter[str]:
    """Run a plan; return how its ranks have ended, and their errors.

    Raises:
        AssertionError: a rank has ended in a foreign error, a wrong round, or not at all.
    """
    plan, pids, pipes = plan_of(seed), {}, {}
    port = memoryview(mmap.mmap(-1, 8)).cast("q")  # of the store, whose threads begin after the last fork
    for process in range(plan.ranks):
        here, there = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(int(LIMIT_S))
            os.write(there, json.dumps(main_of(plan, process, port, seed)).encode())
            os._exit(0)
        os.close(there)
        pids[process], pipes[process] = pid, here
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives the ranks
    port[0] = server.port
    said = dict.fromkeys(pids, b"")
    open_pipes, begin = dict(pipes), time.monotonic()
    stopped: dict[int, float] = {}
    draw = random.Random(seed)
    while open_pipes and time.monotonic() - begin < LIMIT_S:
        ready, _, _ = select.select(list(open_pipes.values()), [], [], 0.02)
        for process, pipe in list(open_pipes.items()):
            if pipe in ready:
                data = os.read(pipe, 1 << 16)
                said[process] += data
                if not data:
                    del open_pipes[process]
            elif process not in stopped and is_stopped(pids[process]):
                stopped[process] = time.monotonic() + draw.uniform(0, LONGEST_STOP_S)
            elif process in stopped and time.monotonic() >= stopped[process]:
                os.kill(pids[process], signal.SIGCONT)
    found: Counter[str] = Counter(plans=1)
    wrong = []
    for process, pid in pids.items():
        if process in open_pipes:
            os.kill(pid, signal.SIGKILL)
        os.close(pipes[process])
        os.waitpid(pid, 0)
        result = json.loads(said[process]) if said[process] else {"end": "hangs" if process in open_pipes else "killed"}
        if result["end"] in ("failed", "hangs"):
            wrong.append(f"process {process} {result['end']}: {result.get('text', '')}")
        found[result["end"]] += 1
        found.update(result.get("errors", {}))
        found["rounds"] += result.get("rounds", 0)
    assert not wrong, f"seed {seed}, {plan}: {'; '.join(wrong)}"
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def found_of(seed: int) -> Counter[str]:
    """Run a plan; print its failure if it fails."""
    try:
        return check(seed)
    except AssertionError as error:
        print(error, flush=True)
        return Counter(plans=1, plans_failed=1)


def run(seeds: range, jobs: int) -> Counter[str]:
    """Run plans, `jobs` at a time, and return what has become of their ranks.

    Each plan forks its ranks from a process of one thread: a fork of several may have a lock that nobody opens.
    """
    every: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for found in pool.map(found_of, seeds):
            every += found
    return every


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.call_plans", description=__doc__)
    parser.add_argument("plans", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first plan")
    parser.add_argument("--jobs", type=int, default=12, help="plans at a time")
    given = parser.parse_args()
    found = run(range(given.first, given.first + given.plans), given.jobs)
    print(json.dumps(dict(sorted(found.items())), indent=1))
    raise SystemExit(found["plans_failed"] > 0)


if __name__ == "__main__":
    main()
