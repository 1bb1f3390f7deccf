"""The program that trains torchtitan's small DeepSeek-V3 over its own dispatcher and over moecomm."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from . import torchtitan_train


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "torchdata", "torch_checkpointing")),
    reason="needs torchtitan and its dependencies, installed",
)
def test_losses_are_those_of_the_all_to_all_dispatcher(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    assert torchtitan_train.main(["4", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(torchtitan_train.RECIPES)
    assert all(row["steps"] == 4 and row["last_loss"] < row["first_loss"] for row in rows)


@pytest.mark.parametrize("losses", [[4.0, 3.0000001], None], ids=["they differ", "a rank failed"])
def test_a_failed_run_leaves_no_result(
    losses: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"2 experts a token": [([4.0, 3.0], 1.0), (losses, 1.0)]} if losses else {}
    monkeypatch.setattr(torchtitan_train, "both", lambda *given: runs)
    assert torchtitan_train.main(["2", "--json", str(tmp_path / "training.json")]) == 1
    assert not list(tmp_path.iterdir())
