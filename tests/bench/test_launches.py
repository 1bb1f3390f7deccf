"""Marks of results whose kernels the host launches otherwise today, without a change of their sources."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecomm.backends import lsa_kernels
from moecomm.fused import schedules
from moecomm.gpu import blocks, tuning

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))


def test_a_choice_of_the_host_changes_the_digests_of_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import launches

    before = {kind: launches._digests(kind) for kind in ("rounds", "domains", "layers")}

    def changed(kind: str) -> set[str]:
        now = launches._digests(kind)
        return {part for part in before[kind] if now[part] != before[kind][part]}

    assert changed("layers") == set()
    choose = tuning.choose
    with monkeypatch.context() as patched:  # as an entry of a tuning table would

        def other(gpu: str, ranks: int, op: str, layout: str, tokens: int) -> tuning.Choice:
            choice = choose(gpu, ranks, op, layout, tokens)
            return replace(choice, blocks=choice.blocks + 1) if (op, tokens) == ("combine", 8192) else choice

        patched.setattr(tuning, "choose", other)
        assert changed("rounds") == {"combine"}
    put_ring = blocks._put_ring
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "_put_ring", lambda spec: put_ring(spec) + 128 * (spec.transport == "gin_proxy"))
        patched.setattr(lsa_kernels, "scaleout_blocks", lambda op, blocks, tokens, ring: blocks + (op == "combine"))
        of_ranks = ("rounds by gin", "dispatch between domains", "combine between domains")
        assert changed("domains") == {f"{part}, {ranks} ranks" for part in of_ranks for ranks in (2, 4, 8)}
    both = schedules.schedule_of_both
    with monkeypatch.context() as patched:

        def shallow(*sizes: Any) -> schedules.Schedule:
            return replace(both(*sizes), stages=both(*sizes).stages - 1)

        patched.setattr(schedules, "schedule_of_both", shallow)
        assert changed("layers") == {"fused layer"}


def test_a_result_is_marked_if_the_host_launches_its_part_otherwise_or_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import launches
    import tables

    found, now, today = {"kernels": tables.digests(), "commit": "of today"}, launches.digests(), launches.today()
    monkeypatch.setattr(launches, "noted", lambda commit: today if commit == "of today" else {})
    assert not tables.older(found, tables.ROUNDS)
    assert tables.older({**found, "commit": "unknown"}, tables.ROUNDS)
    assert tables.older({**found, "commit": ""}, tables.ROUNDS)
    assert not tables.older({**found, "commit": "unknown"}, ("host",)), "a part of which nothing is chosen"
    monkeypatch.setattr(launches, "noted", lambda commit: today | {"launches": now | {"combine": "otherwise"}})
    assert tables.older(found, ("combine",)) and not tables.older(found, ("dispatch",))


def test_every_commit_of_a_result_is_noted_and_no_other() -> None:
    import launches

    results = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*.json")]
    assert launches.unknown(results) == [], "run: python bench/launches.py"
    assert set(json.loads(launches.NOTED.read_text())) <= {found["commit"] for found in results}


def test_the_code_of_repeated_calls_is_that_of_the_functions_they_enter() -> None:
    import launches

    rounds = [text for _, text in launches._calls()]
    assert all("def_begin_call(" in text and text.count("\n") < 10 for text in rounds)
    assert sum("defdispatch(" in text for text in rounds) == 3 and sum("defcombine(" in text for text in rounds) == 6
    assert all("defpublish(" in text for _, text in launches._layer_calls())
    assert {name for kind in ("calls", "layer calls") for name in launches._digests(kind)} == {"calls", "layer calls"}
