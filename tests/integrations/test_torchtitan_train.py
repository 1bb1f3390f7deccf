"""The program that trains torchtitan's small DeepSeek-V3 over its own dispatcher and over moecomm."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from . import torchtitan_train, trained


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "torchdata", "torch_checkpointing")),
    reason="needs torchtitan and its dependencies, installed",
)
def test_losses_are_those_of_the_all_to_all_dispatcher(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    assert trained.main(torchtitan_train.PROGRAM, None, ["4", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(torchtitan_train.RECIPES)
    assert all(row["steps"] == 4 and row["last_loss"] < row["first_loss"] for row in rows)
