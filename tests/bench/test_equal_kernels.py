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
