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
US = {  # by call and variant, of 128 and of 4096 tokens
    ("combine", ""): (20.0, 160.0),
    ("combine", "rows wire"): (25.0, 200.0),
    ("layer", "sequential"): (400.0, 800.0),
    ("layer", "sequential, rows wire"): (410.0, 840.0),
    ("layer", "one launch"): (380.0, 760.0),
    ("layer", "one launch, rows wire"): (381.0, 762.0),
}


def stand_in(calls: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{LIKE}.json").read_text())
    found["machine"]["gpus"] = ["NVIDIA H200"]
    found["case"] |= {"ranks": 1, "tokens": [128, 4096]}
    about = {"model": "qwen3-30b-a3b", "who": "moecomm"}
    rows = [(tokens, call) for tokens in (128, 4096) for call in calls]
    found["rows"] = [
        about | {"tokens": tokens, "what": what, "variant": variant, "us": {"p50": US[what, variant][tokens > 128]}}
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


def test_every_call_has_its_ratio(folder: Path) -> None:
    import ratios

    (folder / "rows-wire-h200.json").write_text(json.dumps(stand_in([*US])))
    (table,) = test_tables.tables_of(ratios.unsummed())
    assert table.heads[3:] == ["`combine`", "`moe(fused=False)`", "`moe(fused=True)`"]
    rows = [[cell.removesuffix(" †") for cell in row] for row in table.rows]
    about = ["1 H200", "qwen3-30b-a3b"]
    assert rows == [[*about, "128", "1.25", "1.02", "1.00"], [*about, "4096", "1.25", "1.05", "1.00"]]


def test_what_was_not_measured_has_no_ratio(folder: Path) -> None:
    import ratios

    assert ratios.unsummed() == "No result is kept yet."
    (folder / "rows-wire-cpu.json").write_text(json.dumps(stand_in([key for key in US if "one launch" not in key[1]])))
    (table,) = test_tables.tables_of(ratios.unsummed())
    assert [row[5] for row in table.rows] == ["", ""] and all(table.rows[0][3:5])
