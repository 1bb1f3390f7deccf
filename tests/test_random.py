"""Random cases against the reference: dispatch and combine, bit for bit.

`pytest tests/test_random.py --cases 1000000 --seed 7` runs more; a failure names the seed of its case.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from typing import Any

import pytest
import torch

from moecomm.testing import LocalBuffers, check_case, random_case, random_sizes

ROUNDS = 200  # cases on one set of Buffers
PROCESSES = 2
SPREAD = 10  # of so many sets of Buffers one has its ranks on all cores
ALL_CORES = os.sched_getaffinity(0)

own_core = ALL_CORES  # of this process


def take_core(cores: Any) -> None:
    """In a new process: one of the cores is its own."""
    global own_core
    own_core = {cores.get()}
    torch.set_num_threads(1)


def run_range(first: int, last: int) -> str:
    """Cases of the Buffers numbered first..last-1; empty, or the first failure."""
    for number in range(first, last):
        # The threads of ranks inherit it.  On one core they take turns; spread over cores that all have other work they
        # wait for those, which takes twice as long and shows interleavings that nobody sees on one.
        os.sched_setaffinity(0, own_core if number % SPREAD else ALL_CORES)
        sizes = random_sizes(number)
        with LocalBuffers(**sizes, backend="host") as ranks:
            for seed in range(number * ROUNDS, (number + 1) * ROUNDS):
                try:
                    check_case(ranks, random_case(seed, **sizes))
                except Exception as error:  # noqa: BLE001 - reported with the sizes that replay it
                    return f"sizes {number} {sizes}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(1800)
def test_random_cases_match_the_reference(request: pytest.FixtureRequest) -> None:
    cases, seed = request.config.getoption("--cases"), request.config.getoption("--seed")
    sets = max(PROCESSES, cases // ROUNDS)
    start = seed * 1_000_000
    print(f"{sets * ROUNDS} cases from seed {seed}")
    step = 5  # small pieces, so that both processes finish together
    pieces = [(first, min(first + step, start + sets)) for first in range(start, start + sets, step)]
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core in itertools.islice(itertools.cycle(sorted(ALL_CORES)), PROCESSES):
        cores.put(core)
    with context.Pool(PROCESSES, take_core, (cores,)) as pool:
        for failure in pool.starmap(run_range, pieces, chunksize=1):
            assert not failure, failure
