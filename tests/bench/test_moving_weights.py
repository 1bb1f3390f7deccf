"""The program that measures weights on the move: no step is wrong, here on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..fresh_python import run_python

PROGRAM = Path(__file__).parents[2] / "bench" / "moving_weights.py"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_no_step_is_wrong_while_experts_move(tmp_path: Path) -> None:
    found = tmp_path / "moving.json"
    sizes = "--ranks 3 --held 2 --hidden 64 --inner 32 --topk 2 --tokens 8,32 --layers 3 --steps 60"
    ran = run_python(PROGRAM, *sizes.split(), "--json", found, timeout_s=100)
    assert ran.returncode == 0, ran.stderr
    copies, *_, steps = json.loads(found.read_text())["rows"]
    assert copies["nbytes"] == 2 * (64 * 64 + 64 * 32) * 2
    assert steps["commits"] == 4 and steps["wrong"] == 0
