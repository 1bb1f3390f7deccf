"""Small cases of the host executor in every interleaving of two ranks, each compared with the oracle."""

from __future__ import annotations

import pytest

from ..few import few
from .build import Workshop
from .mutants import MUTANTS, Mutant
from .test_round_driver import run

CASES = (2, 6)
WATCHED = 10  # the seed of a small one
# Bugs of rounds that run into each other, and the case that has the interleaving in which they show.
SEEDS = {"one notice instead of two by parity": 17, "staging overwritten before it is drained": 19}
RACES = {"payload flag without release": 2, "drained flag without release": 19}


@pytest.mark.parametrize("cases", few(CASES, 2))
def test_every_interleaving_agrees(cases: int, interleavings: Workshop) -> None:
    run(interleavings.intact, ("--cases", str(cases)))


@pytest.mark.long
def test_no_interleaving_has_a_race(watched_interleavings: Workshop) -> None:
    run(watched_interleavings.intact, ("--seed", str(WATCHED)))


@pytest.mark.long
@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.name in SEEDS], ids=lambda mutant: mutant.name)
def test_a_bug_shows_in_some_interleaving(mutant: Mutant, interleavings: Workshop) -> None:
    with pytest.raises(AssertionError, match=r"all ranks wait|differs"):
        run(interleavings.build(mutant), ("--seed", str(SEEDS[mutant.name])))


@pytest.mark.long
@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.name in RACES], ids=lambda mutant: mutant.name)
def test_a_race_shows_in_some_interleaving(mutant: Mutant, watched_interleavings: Workshop) -> None:
    with pytest.raises(AssertionError, match="data race"):
        run(watched_interleavings.build(mutant), ("--seed", str(RACES[mutant.name])))
