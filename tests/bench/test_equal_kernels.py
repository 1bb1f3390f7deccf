"""Sources that compile to the same machine code: what is noted of them, and what follows for results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moecomm_bench import sources

sys.path.append(str(Path(__file__).parents[2] / "bench"))


def test_a_noted_digest_is_as_good_as_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import equal_kernels
    import launches
    import tables

    now = tables.digests()
    monkeypatch.setattr(launches, "noted", lambda commit: launches.today())
    monkeypatch.setattr(equal_kernels, "NOTED", tmp_path / "noted.json")
    assert tables.older({"kernels": now | {"combine": "before"}}, ["combine"])
    equal_kernels.note({"combine": "before"})
    assert not tables.older({"kernels": now | {"combine": "before"}}, ["combine"])
    assert tables.older({"kernels": now | {"combine": "another"}}, ["combine"])
    assert tables.older({"kernels": now | {"dispatch": "before"}}, ["dispatch"]), "of another part"
    assert tables.older({"kernels": now | {"combine": "before"}}, ["combine of few tokens"]), "a part of its own"
    equal_kernels.note({"combine of few tokens": "before"})
    assert not tables.older({"kernels": now | {"combine": "before"}}, ["combine of few tokens"])
    monkeypatch.setattr(tables, "digests", lambda: now | {"combine": "changed since"})
    assert tables.older({"kernels": now | {"combine": "before"}}, ["combine"])


def test_equality_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import equal_kernels

    monkeypatch.setattr(equal_kernels, "NOTED", tmp_path / "noted.json")
    for before, now in (("a", "b"), ("b", "c"), ("c", "c")):
        monkeypatch.setattr(sources, "digests", lambda _, now=now: {"combine": now})
        equal_kernels.note({"combine": before})
    assert json.loads(equal_kernels.NOTED.read_text()) == {"c": ["a", "b"]}


def test_kernels_that_differ_or_are_missing_are_named_by_part() -> None:
    import equal_kernels

    before = {"dispatch, flat": "1", "combine, flat": "2", "combine, batched": "3", "combine, gone": "4"}
    now = {"dispatch, flat": "1", "combine, flat": "2", "combine, batched": "5", "combine, new": "6"}
    names = ["combine, batched", "combine, gone"]
    assert equal_kernels.differing(before, now, ("dispatch", "combine")) == {"dispatch": [], "combine": names}


def test_kernels_with_a_placement_need_a_proof_of_their_own() -> None:
    """At a commit whose tests compile none, nothing shows that they were equal, whatever the others are."""
    import equal_kernels

    part = f"dispatch{equal_kernels.PLACED}"
    assert equal_kernels.source_of(part) == "dispatch" and part in equal_kernels.SETS["rounds"]
    before = {"dispatch, flat": "1"}
    now = {"dispatch, flat": "1", f"{part}, flat": "2", f"{part}, expert": "3"}
    assert equal_kernels.differing(before, now, ("dispatch", part)) == {
        "dispatch": [],
        part: [f"{part}, expert", f"{part}, flat"],
    }
    before[f"{part}, flat"] = "2"
    assert equal_kernels.differing(before, now, ("dispatch", part)) == {"dispatch": [], part: []}


def test_times_with_a_placement_are_marked_by_kernels_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import equal_kernels
    import launches
    import tables
    import topics

    now, load = tables.digests(), tables.load
    earlier = {"kernels": now | {"dispatch": "earlier"}}
    for name, found in (("digests", {}), ("decided", {"forms": "alike"})):  # what the host chooses is as it was
        monkeypatch.setattr(launches, name, lambda found=found: found)
    monkeypatch.setattr(launches, "noted", lambda commit: {"tables": launches.decided()})
    monkeypatch.setattr(topics, "load", lambda name: load(name) | earlier)
    noted = {now["dispatch"]: ["earlier"], f"{now['dispatch']}{equal_kernels.FEW}": ["earlier"]}
    for more, marked in (({}, 2), ({f"{now['dispatch']}{equal_kernels.PLACED}": ["earlier"]}, 0)):
        monkeypatch.setattr(equal_kernels, "_noted", lambda more=more: noted | more)
        rows = [row.split(" | ") for row in topics.placed_experts().splitlines() if "| `" in row]
        assert len(rows) == 6
        for row in rows:
            assert ["†" in cell for cell in row[3:]] == [False] + [marked > 0] * 2
