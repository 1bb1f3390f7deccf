"""python -m tests.soak --minutes MINUTES [--json FILE]: four CPU ranks under random faults, and what they take up.

Rounds are random cases of all layouts, which are compared with the reference; every other one is verified as well.
Meanwhile ranks are killed, in rounds and while others join; a rank calls abort(); a rank is stopped for a moment, or
for longer than the deadline; all close the Buffer and open another of another dtype.  After each fault the ranks that
are left shrink, and new processes take the places of those that are lost.

Process 0 lives through all of that, under every number.  Every minute, with all ranks there and between two rounds, it
notes its memory, descriptors, threads, mappings of shared memory, rounds, times that ranks were invited, and the time
of the machine's cores.  At the end:

- descriptors, threads and mappings must be the same in every sample;
- private memory and the CPU time of a round must not change: of the line through the samples that has the median of all
  slopes between two of them (Theil-Sen), both ends differ by at most 8 MiB, or a fifth of the time.  The CPU time is
  the tenth percentile of the rounds of all ranks since the last sample, which waits on a busy machine change least;
- /dev/shm must have no new file that a process of the soak, or moecomm, has named.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import moecomm
from moecomm.testing import random_case
from moecomm.testing.check import check_case_on_rank
from moecomm_bench import results

from .percentiles import percentiles
from .rejoin import Job, Member
from .supervisor import Supervisor

RANKS, TIMEOUT_S = 4, 15.0
SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": 10,
    "topk": 3,
    "max_tokens": 16,
    "timeout_s": TIMEOUT_S,
    "verify_every": 2,
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTLED = 10  # rounds of all ranks before a sample
LATE_S = 0.03
FAULTS = {"kill": 500, "kill while others join": 200, "abort": 150, "pause": 100, "reopen": 40, "stop": 3}
RATES = ("rounds", "invited", "busy", "stolen")
EXACT = ("descriptors", "threads", "shared_mappings")
ROOM: dict[str, Callable[[float], float]] = {  # that a line through samples may rise or fall
    "private_mib": lambda first: 8.0,
    "cpu_ms_of_a_round": lambda first: first / 5,
}


class Sampler:
    """Note what process 0 takes up, every `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next = every_s, 0.0
        self._cpu_s: list[float] = []  # of rounds of all ranks
        self._last = (0, 0.0)  # round, and the CPU time after it

    def __call__(self, member: Member) -> None:
        if member.process != 0 or len(member.members) < RANKS:
            return
        last, self._last = self._last, (member.rounds, time.process_time())
        if member.number > 1 and last[0] == member.rounds - 1:
            self._cpu_s.append(self._last[1] - last[1])
        if member.number == SETTLED and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            gc.collect()
            counts = {"rounds": member.rounds, "invited": member.job.get("invited")}
            cpu_ms = 1e3 * sorted(self._cpu_s)[len(self._cpu_s) // 10]
            member.job.note(0, kind="sample", **counts, cpu_ms_of_a_round=cpu_ms, **sample())
            self._cpu_s.clear()


def sample() -> dict[str, float]:
    """Return what this process takes up now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "second": time.monotonic(),
        "private_mib": int(status["RssAnon"].split()[0]) / 1024,
        "shared_mib": int(status["RssShmem"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared_mappings": sum("/memfd:" in line or "/dev/shm/" in line for line in maps),
        "shm_files": len(os.listdir("/dev/shm")),
        **cpu_seconds(),
    }


def cpu_seconds() -> dict[str, float]:
    """Return for how long all cores together have been busy, and not been there, because other machines had them."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    seconds = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = seconds
    return {"busy": user + nice + system + interrupts + soft_interrupts, "stolen": stolen}


def make_round(buffer: moecomm.Buffer, number: int) -> None:
    """Make the round of that number, and compare it with the reference."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens")}
    check_case_on_rank(buffer, random_case(number, ranks=buffer.num_ranks, dtype=buffer.dtype, **sizes))


class Soak:
    """Faults until the time is over.

    Args:
        folder: an empty one.
        every_s: between two samples.
        seed: of faults.
    """

    def __init__(self, folder: Path, every_s: float, seed: int) -> None:
        self._draw = random.Random(seed)
        self._every_s = every_s
        self.supervisor = Supervisor(folder, self._member, RANKS, self._draw, processes=1 << 17)
        self._sizes = {**SIZES, "dtype": DTYPES[0]}
        self.faults: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.ms: dict[str, list[float]] = {"shrink": [], "grow": [], "noticed": []}
        self._read: Counter[int] = Counter()  # events of each process
        self.rounds = 0

    def _member(self, job: Job, process: int) -> Member:
        member = Member(job, process, make_round, Sampler(self._every_s))
        signal.signal(signal.SIGUSR1, lambda *_: member.buffer.abort())
        return member

    def run(self, seconds: float) -> list[dict[str, Any]]:
        """Run; return the samples."""
        end = time.monotonic() + seconds
        with self.supervisor as supervisor:
            supervisor.fill(self._sizes)
            while time.monotonic() < end:
                self._until_full(self._draw.randint(SETTLED + 2, 60))
                fault = self._draw.choices(list(FAULTS), list(FAULTS.values()))[0]
                there = set(supervisor.alive)
                getattr(self, "_" + fault.replace(" ", "_"))()
                self.faults[fault] += 1
                self._until_full(0)
                self._account(there | set(supervisor.alive))
            self._until_full(SETTLED + 2)
            there = set(supervisor.alive)
            supervisor.stop()
            self._account(there)
        self.rounds = supervisor.job.get("rounds", 0)
        return [event for event in supervisor.job.events(0) if event["kind"] == "sample"]

    def _until_full(self, rounds: int) -> None:
        supervisor = self.supervisor
        while True:
            supervisor.wait(lambda: supervisor.full(rounds) or len(supervisor.alive) < RANKS)
            if len(supervisor.alive) == RANKS:
                return
            supervisor.fill(self._sizes)

    def _victims(self) -> list[int]:
        return self._draw.sample([one for one in self.supervisor.alive if one], self._draw.randint(1, RANKS - 1))

    def _kill(self) -> None:
        supervisor = self.supervisor
        for victim in self._victims():
            supervisor.kill(victim)
            time.sleep(self._draw.uniform(0, LATE_S))
        left = supervisor.alive
        supervisor.wait(lambda: supervisor.made(left, self._draw.randint(1, 20)))

    def _kill_while_others_join(self) -> None:
        self._kill()
        supervisor = self.supervisor
        new = supervisor.fill(self._sizes)
        number = supervisor.job.get("invited")
        supervisor.wait(lambda: any(supervisor.job.get("waits_for", one) == number for one in new))
        time.sleep(self._draw.uniform(0, LATE_S))
        supervisor.kill(self._draw.choice([one for one in supervisor.alive if one]))

    def _abort(self) -> None:
        supervisor = self.supervisor
        lives = {one: supervisor.job.get("life", one) for one in supervisor.alive}
        supervisor.signal(self._draw.choice(list(lives)), signal.SIGUSR1)
        supervisor.wait(lambda: all(supervisor.job.get("life", one) > life for one, life in lives.items()))

    def _pause(self) -> None:
        """Stop a process for much less than the deadline, which nobody notices."""
        supervisor, victim = self.supervisor, self._draw.choice(self.supervisor.alive)
        supervisor.signal(victim, signal.SIGSTOP)
        time.sleep(self._draw.uniform(0, 0.5))
        supervisor.signal(victim, signal.SIGCONT)

    def _stop(self) -> None:
        """Stop a process until the others have gone on without it."""
        supervisor, victim = self.supervisor, self._draw.choice([one for one in self.supervisor.alive if one])
        supervisor.signal(victim, signal.SIGSTOP)
        left = [one for one in supervisor.alive if one != victim]
        supervisor.wait(lambda: supervisor.made(left, 5))
        supervisor.signal(victim, signal.SIGCONT)
        supervisor.wait(lambda: victim in supervisor.excluded)

    def _reopen(self) -> None:
        self._sizes = {**SIZES, "dtype": self._draw.choice(DTYPES)}
        self.supervisor.fill(self._sizes, reopen=True)
        number = self.supervisor.job.get("invited")
        there = self.supervisor.alive
        self.supervisor.wait(lambda: all(self.supervisor.job.get("life", one) >> 16 == number for one in there))

    def _account(self, there: set[int]) -> None:
        """Check what these processes have noted since the last call, and add it up."""
        known = self.supervisor
        for process in there:
            events = known.job.events(process)
            for event in events[self._read[process] :]:
                self.events[event["kind"]] += 1
                if event["kind"] == "shrink":
                    self._check_shrink(process, event)
                if event["kind"] in self.ms:
                    self.ms[event["kind"]].append(event["ms"])
            self._read[process] = len(events)

    def _check_shrink(self, process: int, event: dict[str, Any]) -> None:
        known, error = self.supervisor, event["error"]
        said = f"process {process}: {event}"
        assert set(event["lost"]) <= known.killed | known.excluded, said
        if error == "PeerLost":
            assert event["peer"] in known.killed, said
            self.ms["noticed"].append(event["noticed_ms"])
        else:
            assert self.faults[{"Aborted": "abort", "Timeout": "stop"}[error]], said


def line(samples: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
    """Return the first and the last value of the line through samples: with the median slope, through the medians."""
    points = [(one["second"], value(one)) for one in samples]
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))
    middle = statistics.median(y - slope * x for x, y in points)
    return middle + slope * points[0][0], middle + slope * points[-1][0]


def rounded(one: dict[str, Any]) -> dict[str, float]:
    """Return a sample as a file keeps it."""
    return {name: round(value, 2) for name, value in one.items() if name != "kind"}


def rates(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples but the first, each with what has happened in a second since the one before."""
    return [{**b, **{f"{name}_per_second": rate(name, a, b) for name in RATES}} for a, b in pairwise(samples)]


def rate(name: str, a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return by how much a value has grown in a second between two samples."""
    return (b[name] - a[name]) / (b["second"] - a["second"])


def check_same(samples: list[dict[str, Any]]) -> None:
    """Raise AssertionError if what must be the same in all samples is not."""
    for name in EXACT:
        assert len({one[name] for one in samples}) == 1, f"{name}: {[one[name] for one in samples]}"


def check_lines(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return lines through samples.  Raises AssertionError if one rises or falls."""
    lines: dict[str, Any] = {}
    for name, room in ROOM.items():
        first, last = line(samples, lambda one, name=name: one[name])
        lines[name] = [round(first, 2), round(last, 2)]
        assert abs(last - first) <= room(first), f"{name}: from {first} to {last}"
    return lines


def files_left(before: set[str], processes: set[int]) -> set[str]:
    """Return new files of /dev/shm that processes of the soak, or moecomm, have named."""
    new = set(os.listdir("/dev/shm")) - before
    return {name for name in new if "moecomm" in name or name.startswith(tuple(f"torch_{pid}_" for pid in processes))}


def soak(seconds: float, every_s: float, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a soak; return its samples and what it has found."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(Path(folder), every_s, seed)
        samples = rates(run.run(seconds))
    row = {
        "kind": "random faults on 4 CPU ranks, exact rounds, and what they take up",
        "minutes": round(seconds / 60, 1),
        "rounds": run.rounds,
        "faults": dict(run.faults),
        "events": dict(run.events),
        **{f"{name}_ms": percentiles(ms) for name, ms in run.ms.items()},
        "shm_files_left": sorted(files_left(before, run.supervisor.pids)),
    }
    return samples, row


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--every", type=float, default=60, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    samples, row = soak(60 * given.minutes, given.every, given.seed)
    begin = samples[0]["second"]
    kept = [{**one, "second": one["second"] - begin} for one in samples]
    print(json.dumps({**row, "samples": [rounded(one) for one in kept]}, indent=1))
    assert not row["shm_files_left"]
    check_same(samples)
    row["lines"] = check_lines(samples)
    if given.json:
        results.write(given.json, {"rows": [row], "samples": [rounded(one) for one in kept]})


if __name__ == "__main__":
    main()
