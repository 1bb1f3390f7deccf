"""A random fault of one rank of a real job: the records of the ranks name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm.flight import reading
from moecomm.flight.explain import explain

from ..conftest import Ranks
from ..few import few
from .faults import HOW, Fault, run_rank, shrink_once

CASES = 9 * len(HOW)


@pytest.mark.parametrize("seed", few(range(CASES), *range(3 * len(HOW))))
def test_the_rank_that_went_astray_is_named(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    fault = Fault.random(seed)
    ranks.start(fault.ranks, run_rank, fault, str(tmp_path))
    dies = fault.kind.startswith(("killed", "silent"))
    errors = ranks.results(fault.ranks - dies)
    (report,) = explain(reading.read([tmp_path / "records"]))
    said = "\n".join(report.lines())
    assert report.verdict.ranks == (fault.victim,), (fault, errors, said)
    assert report.verdict.how in HOW[fault.kind], (fault, errors, said)
    assert f"first astray: rank {fault.victim}: " in said


def test_each_membership_of_a_buffer_has_a_report(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(3, shrink_once, str(tmp_path))
    assert ranks.results(2) == {0: None, 1: None}
    first, second = explain(reading.read([tmp_path]))
    assert (first.ranks, first.verdict.ranks, first.verdict.how) == (3, (2,), "absent")
    assert (second.ranks, second.verdict.ranks, second.verdict.how) == (2, (1,), "exception"), second.lines()
    assert "ZeroDivisionError" in second.verdict.text and second.records[1].last == 3
