"""The comparison of records: of ranks that were never there, and of files that are none."""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from moecomm.base.protocol import PEER_COUNTERS, SCALAR_COUNTERS
from moecomm.errors import Aborted, BadInput, PeerLost, Timeout
from moecomm.observe.flight import reading
from moecomm.observe.flight.explain import Verdict, explain, minority, named
from moecomm.rounds import signature
from moecomm.tools import cli

from .records import FakeRank, random_calls

KINDS = {
    "died": "absent",
    "silent": "no call",
    "silent and ended": "no call",
    "another": "another call",
    "raised": "exception",
    "failed call": "failed call",
    "late": "late",
    "aborted": "aborted",
    "died, and others after it": "absent",
}


def verdict_of(folder: Path, *ranks: FakeRank) -> Verdict:
    for rank in ranks:
        rank.write(folder)
    (report,) = explain(reading.read([folder]))
    return report.verdict


def make_fault(kind: str, choose: random.Random, folder: Path) -> int:
    """Write the records of a job in which one rank goes astray; return that."""
    count, made = choose.randint(3, 9), choose.choice([0, 1, 7, 255, 256, 257, 900])
    ranks = [FakeRank(rank, count, on_host=choose.random() < 0.5) for rank in range(count)]
    victim = choose.randrange(count)
    calls = random_calls(choose, made)
    for rank in ranks:
        rank.make(calls)
    others = [rank for rank in ranks if rank.rank != victim]
    if kind == "silent and ended":  # before the deadline: no rank has failed
        for rank in others:
            rank.begin("dispatch")
            rank.flight.reasons.append("SIGTERM")
    elif kind == "another":
        for rank in ranks:
            rank.make([("combine" if rank.rank == victim else "dispatch", 0), *random_calls(random.Random(made), 3)])
    elif kind in ("late", "aborted"):
        for rank in ranks:
            rank.begin("dispatch")
            rank.fail(Aborted if kind == "aborted" else Timeout, victim)
    else:
        if kind == "raised":
            ranks[victim].raise_in_the_program()
        if kind == "failed call":
            ranks[victim].reject()
        for rank in others:
            rank.begin("dispatch")
            rank.fail(Timeout if kind in ("silent", "failed call") else PeerLost, victim, 3)
        if kind == "died, and others after it":
            first, *rest = others
            for rank in rest:
                rank.flight._fatal = None
                rank.fail(PeerLost, first.rank)
    for rank in others if kind.startswith("died") else ranks:
        rank.write(folder)
    return victim


@pytest.mark.parametrize("kind", KINDS)
def test_random_faults_are_named(kind: str, tmp_path: Path) -> None:
    for seed in range(25):
        folder = tmp_path / str(seed)
        folder.mkdir()
        victim = make_fault(kind, random.Random(f"{kind} {seed}"), folder)
        (report,) = explain(reading.read([folder]))
        assert (report.verdict.ranks, report.verdict.how) == ((victim,), KINDS[kind]), (seed, report.lines())


def pair(**more: Any) -> list[FakeRank]:
    return [FakeRank(rank, 2, **more) for rank in range(2)]


def test_ranks_that_made_the_same_calls_are_not_astray(tmp_path: Path) -> None:
    ranks = pair()
    for rank in ranks:
        rank.make([("dispatch", 0), ("combine", 0)])
        rank.reject()  # on both
        rank.make([("dispatch", 0)])
    assert verdict_of(tmp_path, *ranks) == Verdict((), "none", "all ranks made the same calls, and none waits")


def test_who_waits_longest_is_named_where_nothing_else_is_known(tmp_path: Path) -> None:
    ranks = pair()
    for rank in ranks:
        rank.begin("dispatch")
    found = verdict_of(tmp_path, *ranks)
    assert found.how == "waits longest" and found.ranks == (0,) and "call 1 (dispatch, layout expert" in found.text


def test_of_two_ranks_with_different_calls_both_are_named(tmp_path: Path) -> None:
    one, two = pair()
    one.make([("dispatch", 0)])
    two.make([("dispatch", 2)])
    found = verdict_of(tmp_path, one, two)
    assert found.how == "another call" and found.ranks == (0, 1)
    assert "layout flat" in found.text and "instead of batched" in found.text


def test_a_rank_that_asks_for_a_larger_buffer_is_not_astray(tmp_path: Path) -> None:
    ranks = pair()
    for rank in ranks:
        fields = {signature.GROW.replace(" ", "_"): rank.rank, "layout": 1}
        rank.flight.end(rank.flight.begin(rank.flight.kind("dispatch", signature.pack(**fields), None, 2), 3))
    assert verdict_of(tmp_path, *ranks).how == "none"


def test_the_host_of_a_gpu_rank_may_be_behind_though_another_rank_is_the_culprit(tmp_path: Path) -> None:
    """Rank 1 waits on its device for rank 2, which is gone; its host has enqueued less than that of rank 0."""
    ranks = [FakeRank(rank, 3, on_host=False) for rank in range(3)]
    for rank, calls in zip(ranks, (30, 20, 20), strict=True):
        rank.make([("dispatch", 0)] * calls)
    ranks[0].fail(Timeout, 1)
    ranks[1].fail(PeerLost, 2)
    assert verdict_of(tmp_path, *ranks[:2]).ranks == (2,)


@pytest.mark.parametrize("behind", [0, 1])
def test_of_ranks_that_wait_for_each_other_the_one_with_fewer_calls_is_named(behind: int, tmp_path: Path) -> None:
    """Others wait for rank 2, which waits for one of them, and has made even fewer calls."""
    ranks = [FakeRank(rank, 5, on_host=False) for rank in range(5)]
    for rank, peer in zip(ranks, (1, 0, 0, 2, 2), strict=True):
        rank.make([("dispatch", 0)] * (10 if rank.rank == 2 else 20 if rank.rank == behind else 30))
        rank.fail(Timeout, peer)
    found = verdict_of(tmp_path, *ranks)
    assert (found.ranks, found.how) == ((behind,), "no call")


def test_a_death_that_others_saw_is_named_without_a_failure(tmp_path: Path) -> None:
    ranks = [FakeRank(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.begin("dispatch")
        rank.gone = {2: "its process has ended"}
    assert verdict_of(tmp_path, *ranks[:2]).ranks == (2,)


def test_records_of_several_buffers_are_told_apart_and_the_newer_file_of_a_rank_counts(tmp_path: Path) -> None:
    old, new = FakeRank(0, 1), FakeRank(0, 1)
    old.make([("dispatch", 0)])
    old.write(tmp_path)
    old.make([("dispatch", 0)])
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(old.record()))
    new.rounds.origin.identity = "f" * 16
    new.write(tmp_path)
    first, second = explain(reading.read([newer, tmp_path]))
    assert (first.buffer, first.records[0].last) == ("0123456789abcdef", 2)
    assert second.buffer == "f" * 16


def test_the_command_names_the_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [FakeRank(rank, 4) for rank in range(4)]
    for rank in ranks:
        rank.make([("dispatch", 0), ("combine", 0)])
        if rank.rank != 2:
            rank.begin("dispatch")
            rank.fail(Timeout, 2, 3)
            rank.write(tmp_path)
    monkeypatch.setattr(sys, "argv", ["moecomm", "explain", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capfd.readouterr().out == (
        "Buffer 0123456789abcdef, files of 3 of 4 ranks\n"
        "  first astray: rank 2: no file: it died, or could not write one; ranks 0, 1 and 3 waited for it, 3.0 s\n"
        "  ranks 0, 1 and 3: call 3 (dispatch, layout expert, dtype bfloat16, round 3), failed; "
        "Timeout about rank 2, phase header\n"
        "  rank 2: no file\n"
    )


def bad(**more: Any) -> str:
    rank = FakeRank(0, 2)
    rank.make([("dispatch", 0)])
    record = rank.record()
    record["moecomm"].update(more)
    return json.dumps(record)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "3", '{"moecomm": 3}', "[" * 100_000),
        *(bad(format=2), bad(rank=7), bad(rank=-1), bad(ranks="2"), bad(ranks=1 << 40), bad(gone=3), bad(buffer=None)),
        *(bad(failures=[{"error": "Timeout"}]), bad(failures=[3])),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "moecomm-x.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=f"{path}"):
        reading.read([tmp_path])


def test_no_file_is_named(tmp_path: Path) -> None:
    for paths in ([], [tmp_path], [tmp_path / "absent.json"]):
        with pytest.raises(BadInput, match="FILE"):
            reading.read(paths)


@pytest.mark.parametrize(
    ("values", "found"),
    [("aaaa", []), ("abaa", [1]), ("aabb", [0, 1, 2, 3]), ("abca", [1, 2]), ("ab", [0, 1]), ("", [])],
)
def test_a_minority(values: str, found: list[int]) -> None:
    assert minority(dict(enumerate(values))) == found


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0 and 2"),
        ([0, 1, 2, 5, 6], "ranks 0 to 2, 5 and 6"),
        ([1, 2, 3], "ranks 1 to 3"),
    ],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def counters(rank: int, ranks: int, slow: int) -> bytes:
    """Words of a rank that has waited for one that is slow, and for nobody else."""
    words = [0] * (SCALAR_COUNTERS + PEER_COUNTERS * ranks + 2)
    words[0] = 100
    if rank != slow:
        words[SCALAR_COUNTERS + 4 * ranks + slow] = 500_000_000  # for its header
    return struct.pack(f"<{len(words)}q", *words)


@pytest.mark.parametrize("left", [4, 3])
def test_the_counters_of_all_ranks_say_which_one_is_slow(tmp_path: Path, left: int) -> None:
    for rank in range(4):
        fake = FakeRank(rank, 4)
        fake.counters = counters(rank, 4, slow=2) if rank < left else None
        fake.write(tmp_path)
    [report] = explain(reading.read([tmp_path]))
    said = [line for line in report.lines() if line.startswith("  counters: ")]
    assert said == ["  counters: rank 2 comes late: all other ranks wait for it, 5.0 ms a round"] * (left == 4)


def test_counters_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    fake = FakeRank(0, 2)
    fake.counters = counters(0, 2, slow=1)
    fake.write(tmp_path)
    [file] = tmp_path.iterdir()
    record = json.loads(file.read_text())
    record["moecomm"]["stats"]["rows_to"] = [1]
    file.write_text(json.dumps(record))
    with pytest.raises(BadInput, match="rows_to"):
        reading.read([tmp_path])
