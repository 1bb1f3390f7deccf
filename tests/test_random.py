"""Random cases against the reference: dispatch and combine, bit for bit.

`pytest tests/test_random.py --cases 1000000 --seed 7` runs more; a failure names the seed of its case.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from moecomm.testing import LocalBuffers, check_case, random_case, random_sizes

ROUNDS = 200  # cases on one set of Buffers
PROCESSES = 2


def run_range(first: int, last: int) -> str:
    """Cases of the Buffers numbered first..last-1; empty, or the first failure."""
    torch.set_num_threads(1)
    for number in range(first, last):
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
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for failure in pool.starmap(run_range, pieces, chunksize=1):
            assert not failure, failure
