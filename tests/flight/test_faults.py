"""A random fault of one rank of a real job: the records of the ranks name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm.observe.flight import reading
from moecomm.observe.flight.explain import explain

from ..conftest import Ranks
from ..few import few
from .faults import HOW, Fault, run_rank, shrink_once

CASES = 9 * len(HOW)
# Words of the report about the rank: its last call, or the first that it did not make as the others did.
WHERE = {
    "silent": "its last is call {at} (",
    "another operation": "call {next} (",
    "another layout": "call {next} (",
    "raises": "after call {at} (",
    "bad input": "after call {at} failed there alone",
    "bad input, and goes on": "before call {next}, so ranks are out of step",
}

PHASES = {"dispatch": {"header", "payload"}, "combine": {"header", "reduced", "drained"}}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", few(range(CASES), *range(3 * len(HOW))))
def test_the_rank_that_went_astray_is_named(
    ranks: Ranks, tmp_path: Path, seed: int, pytestconfig: pytest.Config
) -> None:
    for again in range(pytestconfig.getoption("--repeats") or 1):
        check(ranks, tmp_path / str(again), Fault.random(seed + again * CASES))


def check(ranks: Ranks, folder: Path, fault: Fault) -> None:
    """Compare the report on a fault with the fault: rank, call, and phase of the rounds that failed."""
    folder.mkdir()
    ranks.start(fault.ranks, run_rank, fault, str(folder))
    dies = fault.kind.startswith(("killed", "silent"))
    errors = ranks.results(fault.ranks - dies)
    (report,) = explain(reading.read([folder / "records"]))
    said = "\n".join(report.lines())
    about = fault, errors, said
    assert report.verdict.ranks == (fault.victim,), about
    assert report.verdict.how in HOW[fault.kind], about
    assert f"first astray: rank {fault.victim}: " in said
    if fault.kind in WHERE:
        assert WHERE[fault.kind].format(at=fault.at, next=fault.at + 1) in report.verdict.text, about
    lost = [record for record in report.records.values() if record.ending and record.ending.peer == fault.victim]
    assert lost or not dies, about
    for record in lost:
        assert record.ending and f"about rank {fault.victim}, phase {record.ending.phase}" in said, about
        assert record.ending.phase in PHASES[record.calls[record.last].op], about
        if dies and "any moment" not in fault.kind:
            assert (record.last, record.ending.phase) == (fault.at + 1, "header"), about


def test_each_membership_of_a_buffer_has_a_report(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(3, shrink_once, str(tmp_path))
    assert ranks.results(2) == {0: None, 1: None}
    first, second = explain(reading.read([tmp_path]))
    assert (first.ranks, first.verdict.ranks, first.verdict.how) == (3, (2,), "absent")
    assert (second.ranks, second.verdict.ranks, second.verdict.how) == (2, (1,), "exception"), second.lines()
    assert "ZeroDivisionError" in second.verdict.text and second.records[1].last == 3
