"""Marks of results whose kernels the host launches otherwise today, without a change of their sources."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecomm import tuning
from moecomm.backends import lsa_kernels
from moecomm.fused import schedules
from moecomm.gpu import blocks

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

    found, now = {"kernels": tables.digests(), "commit": "of today"}, launches.digests()
    monkeypatch.setattr(launches, "noted", lambda commit: {"launches": now} if commit == "of today" else {})
    assert not tables.older(found, tables.ROUNDS)
    assert tables.older({**found, "commit": "unknown"}, tables.ROUNDS)
    assert tables.older({**found, "commit": ""}, tables.ROUNDS)
    assert not tables.older({**found, "commit": "unknown"}, ("host",)), "a part of which nothing is chosen"
    monkeypatch.setattr(launches, "noted", lambda commit: {"launches": now | {"combine": "otherwise"}})
    assert tables.older(found, ("combine",)) and not tables.older(found, ("dispatch",))


def test_a_result_of_two_ranks_is_not_marked_by_a_choice_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    import launches
    import tables

    now = launches.digests()
    then = now | {"combine between domains, 4 ranks": "otherwise"}
    monkeypatch.setattr(launches, "noted", lambda commit: {"launches": then})
    found = {"kernels": tables.digests(), "commit": "of today"}
    marked = {ranks: tables.older({**found, "case": {"ranks": ranks}}, tables.DOMAINS) for ranks in (2, 3, 4)}
    assert marked == {2: False, 3: True, 4: True} and tables.older(found, tables.DOMAINS)


def test_every_commit_of_a_result_is_noted_and_no_other() -> None:
    import launches

    results = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*.json")]
    assert launches.unknown(results) == [], "run: python bench/launches.py"
    assert set(json.loads(launches.NOTED.read_text())) <= {found["commit"] for found in results}


def test_rounds_between_domains_are_marked_by_what_they_go_through() -> None:
    import launches
    import tables

    from moecomm_bench import sources

    for part in {part for parts in tables.THROUGH.values() for part in parts}:
        assert part in sources.PARTS or launches.keys(part, None), part
    assert "puts" in tables.THROUGH["lsa"] and "NIC" in tables.THROUGH["emulated NIC"]
