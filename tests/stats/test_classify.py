"""The classifier on made-up and on recorded counters: it names the outlier, and nothing in a healthy job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moecomm.observe.stats.classify import DEVIATIONS, FLOOR_NS, STALL_NS, Finding, classify
from moecomm.observe.stats.counters import JobStats

from .matrices import job, usual
from .recorded import JOBS, Recorded

MS = 1_000_000
HEADER, DISPATCH, COMBINE = range(3)


def found(counters: JobStats) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.where) for finding in classify(counters)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64])
def test_a_healthy_job_has_nothing_that_stands_out(ranks: int) -> None:
    for seed in range(5):
        assert classify(job(usual(ranks, seed=seed))) == []
    assert classify(job(torch.zeros(3, ranks, ranks, dtype=torch.int64), rounds=0)) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_all_others_wait_for_comes_late(ranks: int) -> None:
    waits = usual(ranks)
    waits[HEADER, :, 1] += 300 * MS  # 3 ms a round
    waits[HEADER, 1, 1] = 0
    waits[HEADER, 1] = 0  # it comes last, and waits for nobody
    [finding] = classify(job(waits))
    assert (finding.kind, finding.where) == ("slow rank", (1,))
    assert finding.factor > 3
    wait = "all other ranks wait" if ranks > 2 else "the other rank waits"
    assert finding.text == f"rank 1 comes late: {wait} for it, 3.0 ms a round"


def test_a_slow_rank_with_many_rows_says_so() -> None:
    waits = usual(4)
    waits[HEADER, :, 2] += 300 * MS
    waits[HEADER, 2] = 0
    rows = torch.full((4, 4), 1000)
    rows[:, 2] = 3000
    [finding] = classify(job(waits, rows))
    assert finding.text.endswith("; it gets 2.0 times the mean rows")


def test_a_rank_that_one_peer_does_not_wait_for_is_not_called_slow() -> None:
    waits = usual(4)
    waits[HEADER, :2, 3] += 300 * MS
    assert found(job(waits)) == []


def test_two_slow_ranks_are_both_named() -> None:
    waits = usual(8)
    for rank in (2, 5):
        waits[HEADER, :, rank] += 300 * MS
        waits[HEADER, rank, rank] = 0
    assert {where for _, where in found(job(waits))} == {(2,), (5,)}


@pytest.mark.parametrize("phase", [DISPATCH, COMBINE])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_pair_that_waits_for_rows_is_a_slow_link(ranks: int, phase: int) -> None:
    waits = usual(ranks)
    waits[phase, 0, 1] += 200 * MS
    [finding] = classify(job(waits))
    assert (finding.kind, finding.where) == ("slow link", (1, 0))
    assert finding.text.startswith("the link from rank 1 to rank 0 is slow: rank 0 waits ")


@pytest.mark.parametrize("beside", ["other peers of the rank that waits", "other ranks that wait for the peer"])
def test_a_link_is_slow_only_if_it_is_slower_than_those_beside_it(beside: str) -> None:
    """Most ranks beside it wait as well, but not all, which would be a slow end."""
    for factor, want in ((2.9, []), (3.1, [("slow link", (1, 0))])):
        waits = usual(8)
        line = waits[DISPATCH, 0, 2:6] if beside.startswith("other peers") else waits[DISPATCH, 2:6, 1]
        line += 200 * MS
        waits[DISPATCH, 0, 1] = int(factor * int(line.max()))
        assert found(job(waits)) == want


def test_a_link_with_many_rows_says_so() -> None:
    waits, rows = usual(4), torch.full((4, 4), 1000)
    waits[DISPATCH, 3, 1] += 200 * MS
    rows[1, 3] = 9000
    [finding] = classify(job(waits, rows))
    assert finding.text.endswith("; it carries 9.0 times the mean rows")


def test_a_rank_whose_links_are_all_slow_is_named_and_not_each_link() -> None:
    waits = usual(4)
    waits[DISPATCH, :, 2] += 200 * MS
    waits[DISPATCH, 2, 2] = 0
    assert found(job(waits)) == [("slow sender", (2,))]
    waits = usual(4)
    waits[COMBINE, 2] += 200 * MS
    waits[COMBINE, 2, 2] = 0
    assert found(job(waits)) == [("slow receiver", (2,))]


def test_short_waits_are_no_matter_how_uneven() -> None:
    rounds = 100_000
    waits = torch.zeros(3, 4, 4, dtype=torch.int64)
    waits[HEADER, :, 1] = waits[DISPATCH, 0, 3] = (FLOOR_NS - 1) * rounds
    waits[HEADER, 1] = 0
    assert found(job(waits, rounds=rounds)) == []
    waits[HEADER, :, 1] += 200 * rounds
    waits[HEADER, 1] = 0
    assert found(job(waits, rounds=rounds)) == [("slow rank", (1,))]


@pytest.mark.parametrize("stalls", [0, 16])
def test_a_few_stalls_are_noise_and_many_stand_out(stalls: int) -> None:
    """All ranks wait for each other `stalls` times, and for rank 1 more often."""
    for more, want in ((0.9, []), (1.1, [("slow rank", (1,))])):
        waits = torch.full((3, 4, 4), stalls * STALL_NS)
        waits[DISPATCH:] = 0
        waits[HEADER, :, 1] += int(max(DEVIATIONS * max(1, stalls) ** 0.5 * more, 2 * stalls * more) * STALL_NS)
        assert found(job(waits, rounds=10)) == want


def test_a_rank_that_gets_its_rows_late_is_late_because_of_the_link() -> None:
    """The link from rank 1 to rank 0 takes 5 ms, so all wait for rank 0 in the combine."""
    for ranks in (2, 3, 4, 8):
        waits = usual(ranks)
        waits[DISPATCH, 0, 1] += 250 * MS
        waits[HEADER, :, 0] += 250 * MS
        waits[HEADER, 0, 0] = 0
        assert found(job(waits)) == [("slow link", (1, 0))]


def test_the_links_of_a_late_rank_are_named_only_if_they_take_longer() -> None:
    waits = usual(4)
    waits[HEADER, :, 1] += 800 * MS
    waits[HEADER, 1] = 0
    for kind, line in (("slow sender", waits[DISPATCH, :, 1]), ("slow receiver", waits[DISPATCH, 1])):
        line += 200 * MS
        waits[DISPATCH, 1, 1] = 0
        assert found(job(waits)) == [("slow rank", (1,))]
        line += 1400 * MS
        waits[DISPATCH, 1, 1] = 0
        assert (kind, (1,)) in found(job(waits))
        line -= 1600 * MS


def test_rows_come_as_unevenly_as_ranks_run() -> None:
    waits = usual(4)
    waits[DISPATCH, 0, 3] += 200 * MS
    assert found(job(waits)) == [("slow link", (3, 0))]
    waits[HEADER] += 150 * MS
    waits[HEADER].fill_diagonal_(0)
    assert found(job(waits)) == []


def test_what_does_not_hold_up_the_job_is_not_named() -> None:
    waits = usual(8)
    waits[DISPATCH, 6, 0] += 200 * MS
    waits[HEADER, :, 4] += 3000 * MS
    waits[HEADER, 4] = 0
    assert found(job(waits)) == [("slow rank", (4,))]


@pytest.mark.parametrize("real", JOBS)
def test_recorded_jobs_have_no_finding_but_the_rank_that_slept(real: Recorded) -> None:
    header, rows = torch.tensor(real.header), torch.tensor(real.rows)
    waits = torch.stack([header, rows, torch.zeros_like(rows)]) * 1000
    want = [] if real.slow is None else [("slow rank", (real.slow,))]
    assert found(job(waits, rounds=real.rounds)) == want


def test_hot_experts_are_named_from_twice_the_mean_on() -> None:
    experts = torch.full((16,), 1000)
    experts[5] = 2100
    assert found(job(usual(8), experts=experts)) == []  # 1.97 times the mean
    experts[5], experts[9] = 4000, 3000
    assert found(job(usual(8), experts=experts)) == [("hot expert", (5,)), ("hot expert", (9,))]
    text = classify(job(usual(8), experts=experts))[0].text
    assert text == "expert 5 is hot: 3.0 times the mean rows, 19% of all"


def test_few_rows_make_no_hot_expert() -> None:
    experts = torch.tensor([1, 0, 2, 1, 0, 0, 3, 1])  # 3 times the mean of 1
    assert found(job(usual(4), experts=experts)) == []


def test_ranks_with_different_numbers_of_experts() -> None:
    counters = job(usual(2), experts=torch.tensor([100, 100, 100, 100]))
    first = replace(counters.by_rank[0], rows_per_expert=torch.tensor([100, 100, 900]))
    uneven = JobStats.of_ranks([first, counters.by_rank[1]])
    assert found(uneven) == [("hot expert", (2,))]


def test_a_finding_of_each_kind_at_once() -> None:
    waits, experts = usual(8), torch.full((16,), 1000)
    waits[HEADER, :, 4] += 300 * MS
    waits[HEADER, 4] = 0
    waits[DISPATCH, 6, 0] += 200 * MS
    experts[15] = 9000
    findings = classify(job(waits, experts=experts))
    assert [finding.where for finding in findings] == [(4,), (0, 6), (15,)]
    assert all(isinstance(finding, Finding) and finding.text for finding in findings)
