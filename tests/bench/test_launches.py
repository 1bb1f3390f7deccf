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


def test_a_result_of_two_ranks_is_not_marked_by_a_choice_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    import launches
    import tables

    now = launches.digests()
    then = now | {"combine between domains, 4 ranks": "otherwise"}
    monkeypatch.setattr(launches, "noted", lambda commit: launches.today() | {"launches": then})
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


# Rules that decide for no model of moecomm.router at the sizes that are measured, and that of layers of one rank.
UNUSED = [("gemms", 4), ("fused_gemms", 3), ("layers", 0)]


def test_each_line_of_the_tuning_table_marks_what_it_decides() -> None:
    import launches

    text, now = json.loads((ROOT / launches._TABLES[0]).read_text()), launches.decided()
    parts = {"gemms": {"GEMM"}, "fused_gemms": {"fused layer"}, "layers": {"forms"}}
    unused = []
    for kind, lines in text.items():
        for number, line in enumerate(lines if kind != "gpu" else ()):
            other = launches.of_table(
                json.dumps({**text, kind: [*lines[:number], changed_line(kind, line), *lines[number + 1 :]]})
            )
            marked = {part for part in now if other[part] != now[part]}
            if not marked:
                unused.append((kind, number))
            elif kind == "entries":
                few = launches.FEW if line["tokens"] <= 132 else ""
                assert marked == {f"{line['op']}{few}", f"{line['op']} between domains"}
            else:
                assert marked == parts[kind]
    assert unused == UNUSED


def changed_line(kind: str, line: dict[str, Any]) -> dict[str, Any]:
    if kind == "entries":
        return line | {"blocks": line["blocks"] % 132 + 1}
    if kind == "layers":
        return line | {"least_rows_of_rank": line["least_rows_of_rank"] + 1}
    names = (*(schedules.SCHEDULES if line["dtype"] == "bf16" else schedules.FP8_SCHEDULES),)
    return line | {"schedule": names[names[0] == line["schedule"]]}


def test_a_result_is_marked_if_the_tuning_table_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    import launches
    import tables

    found, today = {"kernels": tables.digests(), "commit": "any"}, launches.today()
    decided = today["tables"] | {"forms": "otherwise"}
    monkeypatch.setattr(launches, "noted", lambda commit: today | {"tables": decided})
    assert tables.older(found, ("forms",)) and not tables.older(found, tables.LAYER)


def test_the_code_of_repeated_calls_is_that_of_the_functions_they_enter() -> None:
    import launches

    rounds = [text for _, text in launches._calls()]
    assert all("def_begin_call(" in text and text.count("\n") < 10 for text in rounds)
    assert sum("defdispatch(" in text for text in rounds) == 3 and sum("defcombine(" in text for text in rounds) == 6
    assert all("defpublish(" in text for _, text in launches._layer_calls())
    assert {name for kind in ("calls", "layer calls") for name in launches._digests(kind)} == {"calls", "layer calls"}


def test_eager_times_are_marked_by_themselves_if_only_calls_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import launches
    import tables
    import times

    today = launches.today()
    other = today | {"launches": today["launches"] | {"calls": "other functions"}}
    load = tables.load
    for module in (tables, times):
        monkeypatch.setattr(module, "load", lambda name: load(name) | {"kernels": tables.digests()})
    name = "times-few-h200-4"
    for noted, marked in ((today, set()), (other, {"eager", "host"})):
        monkeypatch.setattr(launches, "noted", lambda commit, noted=noted: noted)
        heads = next(line for line in times.operations().splitlines()).strip("| ").split(" | ")
        rows = [row.strip("|").split(" | ") for row in times.rows_of(name)]
        found = {heads[at] for row in rows for at, cell in enumerate(row) if "†" in cell}
        assert found == marked and all("moecomm" in row[2] for row in rows if any("†" in cell for cell in row))


def test_a_combine_that_casts_is_as_it_was_with_the_same_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/equal_kernels.py does not compare such kernels."""
    import equal_kernels
    import launches
    import tables

    assert equal_kernels.source_of(launches.CASTING) == "combine"
    now = tables.digests()
    monkeypatch.setattr(launches, "noted", lambda commit: launches.today())
    monkeypatch.setattr(equal_kernels, "_noted", lambda: {now["combine"]: ["other"]})
    earlier = {"kernels": now | {"combine": "other"}}
    assert not tables.older(earlier, ("combine",)) and tables.older(earlier, tables.CASTING)
    assert not tables.older({"kernels": now}, tables.CASTING)
