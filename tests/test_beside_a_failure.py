"""A Buffer that loses a rank does not disturb another Buffer of the same processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import moecomm

from .conftest import Ranks
from .core.test_membership import SIZES, die_in_a_round, sums, until_it_fails
from .few import few
from .kill_plans import EXACT

VICTIM = 2


def beside(rank: int, group: Any) -> tuple[int, tuple[int, ...]]:
    """Rank 2 dies.  A thread of each survivor makes rounds on a Buffer that rank 2 has no part in, before and after."""
    pair = dist.new_group([0, 1])
    failing = moecomm.Buffer(group, **SIZES)
    if rank == VICTIM:
        die_in_a_round(failing)
    with moecomm.Buffer(pair, **SIZES, timeout_s=20) as healthy, ThreadPoolExecutor(1) as thread:

        def rounds() -> int:
            for _ in range(EXACT):
                sums(healthy)
            return EXACT

        meanwhile = thread.submit(rounds)
        error = until_it_fails(failing)
        assert isinstance(error, moecomm.PeerLost) and error.peer == VICTIM
        done = meanwhile.result()
        done += rounds()  # beside a Buffer that has failed
        lost = failing.shrink().lost
        for _ in range(20):
            sums(healthy)
            sums(failing)
        failing.close()
        return done + rounds(), lost


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", few((1, 5), 1))
def test_the_other_buffer_goes_on(ranks: Ranks, kills: int, pytestconfig: pytest.Config) -> None:
    for _ in range(pytestconfig.getoption("--repeats") or kills):
        ranks.start(3, beside)
        assert ranks.results(2) == dict.fromkeys((0, 1), (3 * EXACT, (VICTIM,)))
