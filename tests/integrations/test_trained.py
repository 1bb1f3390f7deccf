"""The comparison of losses over two dispatchers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import trained

NEVER: Any = None  # no rank starts
PROGRAM = trained.Program("a.b", "a model", "pytest", 2, NEVER, NEVER, {"exact": 0.0, "near": 1e-2}, 1e-3)


def _main(monkeypatch: pytest.MonkeyPatch, runs: trained.Runs, *words: str) -> int:
    monkeypatch.setattr(trained, "both", lambda *given: runs)
    return trained.main(PROGRAM, None, ["2", *words])


@pytest.mark.parametrize("losses", [[4.0, 3.0000001], None], ids=["they differ", "a rank failed"])
def test_a_failed_run_leaves_no_result(
    losses: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: Any = {"exact": [([4.0, 3.0], 1.0), (losses, 1.0)]} if losses else {}
    assert _main(monkeypatch, runs, "--json", str(tmp_path / "training.json")) == 1
    assert not list(tmp_path.iterdir())


def test_each_recipe_has_its_bound_and_gpus_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result says at which step losses part, and how far the framework's own two runs are apart."""
    runs: trained.Runs = {"near": [([4.0, 2.0], 1.0), ([4.0, 2.01], 1.0), ([4.0, 2.0], 1.0)]}
    file = tmp_path / "training.json"
    assert _main(monkeypatch, runs, "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["same_steps"], row["their_own_difference"], row["their_own_same_steps"]) == (1, 0.0, 2)
    assert abs(row["largest_difference"] - 0.005) < 1e-9
    assert _main(monkeypatch, runs, "--gpus", "2") == 1
