"""bench/quantized_training.py: its program on two ranks, and how much casts may change a loss."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.long
def test_runs_start_alike_and_differ_by_their_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    program = importlib.import_module("quantized_training")
    monkeypatch.setattr(program, "MEAN_OF", 1)
    monkeypatch.setattr(sys, "argv", ["quantized_training.py", "--steps", "2", "--json", str(tmp_path / "x.json")])
    program.main()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["forward"], row["backward"], row["sequences"]) for row in rows] == list(program.RUNS)
    first = {(row["forward"], row["sequences"]): row["losses"][0] for row in rows}
    assert len(first) == 4 and len(set(first.values())) == 4  # a cast of gradients changes no first loss
    for row in rows:
        assert len(row["losses"]) == 2 and row["losses"][0] == first[row["forward"], row["sequences"]]
        assert row["sequences"] or abs(row["losses"][0] - first["bf16", 0]) < 0.05
