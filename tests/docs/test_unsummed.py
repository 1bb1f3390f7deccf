"""The table of docs/batch_invariance.md from a result of `moecomm bench moe --rows-wire`, for which one with made-up
times stands in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from . import test_tables

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))
LIKE = "moe-qwen3-30b-a3b-h200-4"
US = {  # by call and variant; of 128 tokens, and twice that of 4096
    ("combine", ""): 20.0,
    ("combine", "rows wire"): 25.0,
    ("layer", "sequential"): 400.0,
    ("layer", "sequential, rows wire"): 410.0,
    ("layer", "one launch"): 380.0,
    ("layer", "one launch, rows wire"): 381.0,
}


def stand_in(calls: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{LIKE}.json").read_text())
    found["machine"]["gpus"] = ["NVIDIA H200"]
    found["case"] |= {"ranks": 1, "tokens": [128, 4096]}
    about = {"model": "qwen3-30b-a3b", "who": "moecomm"}
    rows = [(tokens, call) for tokens in (128, 4096) for call in calls]
    found["rows"] = [
        about
        | {"tokens": tokens, "what": what, "variant": variant, "us": {"p50": US[what, variant] * (1 + tokens // 4096)}}
        for tokens, (what, variant) in rows
    ]
    found["rows"].append(about | {"tokens": 128, "what": "combine", "variant": "", "who": "torch", "why": "absent"})
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(test_tables, "RESULTS", tmp_path)
    test_tables.result.cache_clear()
    return tmp_path


def test_every_call_has_a_row_with_both_times_and_their_ratio(folder: Path) -> None:
    import ratios

    (folder / "rows-wire-h200.json").write_text(json.dumps(stand_in([*US])))
    (table,) = test_tables.tables_of(ratios.unsummed())
    assert test_tables.strange(table) == []
    cells = [[cell.removesuffix(" †") for cell in row[2:]] for row in table.rows]
    assert cells == [
        ["128", "`combine`", "20.0 us", "25.0 us", "1.25"],
        ["128", "`moe(fused=False)`", "400 us", "410 us", "1.02"],
        ["128", "`moe(fused=True)`", "380 us", "381 us", "1.00"],
        ["4096", "`combine`", "40.0 us", "50.0 us", "1.25"],
        ["4096", "`moe(fused=False)`", "800 us", "820 us", "1.02"],
        ["4096", "`moe(fused=True)`", "760 us", "762 us", "1.00"],
    ]
    assert {tuple(row[:2]) for row in table.rows} == {("1 H200", "qwen3-30b-a3b")}


def test_what_was_not_measured_has_no_row(folder: Path) -> None:
    import ratios

    assert ratios.unsummed() == "No result is kept yet."
    (folder / "rows-wire-cpu.json").write_text(json.dumps(stand_in([key for key in US if "one launch" not in key[1]])))
    (table,) = test_tables.tables_of(ratios.unsummed())
    assert [row[3] for row in table.rows] == ["`combine`", "`moe(fused=False)`"] * 2
