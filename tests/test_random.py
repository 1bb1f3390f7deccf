"""Random cases against the reference: dispatch and combine, bit for bit.

`pytest tests/test_random.py --cases 1000000 --seed 7` runs more; a failure names the seed of its case.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from moecomm.testing import LocalBuffers, check_case, random_case, random_sizes
from moecomm.testing.cases import placed, random_placement

from .conftest import Begun
from .few import few

FEW, MANY = 1_000, 8_000  # cases of a plain run, and of a long one
ROUNDS = 200  # cases on one set of Buffers
PROCESSES = 2
SPREAD = 10  # of so many sets of Buffers one has its ranks on all cores
ALL_CORES = os.sched_getaffinity(0)


@dataclass
class Running:
    """Processes that run cases until there are no more, and what one of them says of a case that fails."""

    cases: int
    processes: list[Any]
    failures: Any


@contextmanager
def begin(config: pytest.Config, long: bool) -> Iterator[Running]:
    """Before the first test, for the last: see `begun` in tests/conftest.py."""
    cases, seed = config.getoption("--cases") or (MANY if long else FEW), config.getoption("--seed")
    sets = max(PROCESSES, cases // ROUNDS)
    start = seed * 1_000_000
    context: Any = multiprocessing.get_context("spawn")
    following, failures = context.Value("q", start), context.SimpleQueue()
    cores = sorted(ALL_CORES)
    processes = [
        context.Process(target=run_sets, args=(cores[nth % len(cores)], following, start + sets, failures), daemon=True)
        for nth in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    try:
        yield Running(sets * ROUNDS, processes, failures)
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_sets(core: int, following: Any, end: int, failures: Any) -> None:
    """In a process of its own: sets of Buffers, each the following one, before number `end` or the first failure."""
    os.nice(19)  # other tests have deadlines
    torch.set_num_threads(1)
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= end:
            return
        if failure := run_set(number, core):
            following.value = end
            failures.put(failure)
            return


def run_set(number: int, core: int) -> str:
    """Cases of the Buffers of that number; empty, or the first failure."""
    # The threads of ranks inherit it.  On one core they take turns; spread over cores that all have other work they
    # wait for those, which takes twice as long and shows interleavings that nobody sees on one.
    os.sched_setaffinity(0, {core} if number % SPREAD else ALL_CORES)
    sizes = random_sizes(number)
    # Verify no round in a third of the sets, all in another, and every other one in the last.
    # Every fourth set has its experts somewhere, and moves them now and then.
    balanced = number % 8 == 1  # and only one domain
    lost = (2 - number // 8) % 3  # ranks whose experts may have no slot
    drawn = partial(random_placement, **sizes, balanced=balanced, lost=lost)
    first = drawn(number) if number % 4 == 1 else None
    with LocalBuffers(**sizes, backend="host", verify_every=number % 3, placement=first) as ranks:
        for seed in range(number * ROUNDS, (number + 1) * ROUNDS):
            case = random_case(seed, **sizes)
            try:
                if first is not None:
                    case = placed(case)
                    if seed % 5 == 0:
                        ranks.set_placement(drawn(seed, slots=first.slots))
                check_case(ranks, case)
            except Exception as error:  # noqa: BLE001 - reported with the sizes that replay it
                return f"sizes {number} {sizes}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", few(("few", "many"), "few"))
def test_random_cases_match_the_reference(cases: str, request: pytest.FixtureRequest, begun: Begun) -> None:
    running: Running = begun[__name__]
    print(f"{running.cases} cases from seed {request.config.getoption('--seed')}")
    for process in running.processes:
        process.join()
    assert running.failures.empty(), running.failures.get()
    assert [process.exitcode for process in running.processes] == [0] * PROCESSES
