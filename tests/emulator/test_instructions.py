"""Work of a block by number of ranks and blocks: work that every block repeats is found by counting."""

from __future__ import annotations

import pytest

from .instructions import LAYOUTS, RANKS, SHARED_ABOVE, measure, words
from .machine import Machine

# Basic blocks: of a thread for each rank more, of a block for each word more that ranks tell each other.
OF_A_RANK, OF_A_WORD = 100, 90


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_work_of_a_thread_grows_with_the_ranks_alone(layout: str) -> None:
    """R ranks have R * (E + R) counts: a thread that read them all would run thousands of basic blocks more a rank."""
    few, many = 8, SHARED_ABOVE
    before, after = (measure(Machine(1, counted=True), ranks, layout) for ranks in (few, many))
    for what, (of_a_thread, of_a_block) in after.items():
        assert of_a_thread - before[what][0] <= OF_A_RANK * (many - few), what
        assert 0 < of_a_block - before[what][1] <= OF_A_WORD * (words(many, 1) - words(few, 1)), what


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "layout"), list(zip(RANKS[2:], LAYOUTS, strict=True)))
def test_blocks_of_many_ranks_share_the_counts(ranks: int, layout: str) -> None:
    """A line through the work of one block and of four, by the words that each reads, meets that of sixteen."""
    one, four, sixteen = (measure(Machine(blocks, counted=True), ranks, layout)["dispatch"][1] for blocks in (1, 4, 16))
    a_word = (one - four) / (words(ranks, 1) - words(ranks, 4))
    assert sixteen == pytest.approx(four - a_word * (words(ranks, 4) - words(ranks, 16)), rel=0.15)
    assert a_word > 0


def test_counts_do_not_depend_on_the_order_of_threads() -> None:
    machine = Machine(1, counted=True)
    first, other = (measure(machine, 16, "expert") for _ in range(2))  # another seed
    for what, (of_a_thread, of_a_block) in first.items():
        assert other[what][0] == pytest.approx(of_a_thread, rel=0.05), what
        assert other[what][1] == pytest.approx(of_a_block, rel=0.02), what
