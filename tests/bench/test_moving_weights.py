"""The program that measures weights on the move: no step is wrong, here on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "moving_weights.py"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_no_step_is_wrong_while_experts_move(tmp_path: Path) -> None:
    found = tmp_path / "moving.json"
    sizes = "--ranks 3 --held 2 --hidden 64 --inner 32 --topk 2 --tokens 8,32 --layers 3 --steps 60"
    subprocess.run([sys.executable, str(PROGRAM), *sizes.split(), "--json", str(found)], check=True, timeout=100)
    copies, *_, steps = json.loads(found.read_text())["rows"]
    assert copies["nbytes"] == 2 * (64 * 64 + 64 * 32) * 2
    assert steps["commits"] == 4 and steps["wrong"] == 0
