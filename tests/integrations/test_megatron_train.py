"""The program that trains a small GPT of Megatron-core over its own dispatcher and over moecomm."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from . import megatron_train, trained


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core, installed")
def test_losses_are_those_of_the_all_to_all_dispatcher(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    assert trained.main(megatron_train.PROGRAM, None, ["5", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(megatron_train.RECIPES)
    assert all(row["steps"] == 5 and row["last_loss"] < row["first_loss"] for row in rows)
