"""Work of a block by number of ranks: a regression from a column a thread to all columns is found by counting."""

from __future__ import annotations

import pytest

from .instructions import EXPERTS, RANKS, measure
from .machine import Machine
from .test_kernels import pytestmark as pytestmark

# Basic blocks: of a thread for each rank more, of a block for each word more that ranks tell each other.
OF_A_RANK, OF_A_WORD = 100, 90


def words(ranks: int) -> int:
    """Return the counts that a block reads."""
    return ranks * (EXPERTS + ranks)


@pytest.mark.parametrize("layout", ["flat", "expert"])
def test_the_work_of_a_thread_grows_with_the_ranks_alone(layout: str) -> None:
    """R ranks have R * (E + R) counts: a thread that read them all would run thousands of basic blocks more a rank."""
    few, many = RANKS[1:3]
    before, after = (measure(Machine(1, counted=True), ranks, layout) for ranks in (few, many))
    for what, (of_a_thread, of_a_block) in after.items():
        assert 0 < of_a_thread - before[what][0] <= OF_A_RANK * (many - few), what
        assert 0 < of_a_block - before[what][1] <= OF_A_WORD * (words(many) - words(few)), what


def test_counts_do_not_depend_on_the_order_of_threads() -> None:
    machine = Machine(1, counted=True)
    first, other = (measure(machine, 16, "expert") for _ in range(2))  # another seed
    for what, (of_a_thread, of_a_block) in first.items():
        assert other[what][0] == pytest.approx(of_a_thread, rel=0.05), what
        assert other[what][1] == pytest.approx(of_a_block, rel=0.02), what
