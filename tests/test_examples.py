"""Examples do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moecomm

from .few import few

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))


@pytest.mark.parametrize(("steps", "ranks", "loss"), few([(20, 2, 3.5), (200, 4, 3.2)], (20, 2, 3.5)))
def test_a_language_model_learns_the_same_on_several_ranks_and_on_one(steps: int, ranks: int, loss: float) -> None:
    program = str(ROOT / "examples" / "train_language_model.py")
    command = [sys.executable, program, "--steps", str(steps), "--ranks", str(ranks)]
    packages = str(Path(moecomm.__file__).parent.parent)  # of the moecomm that is tested
    found = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    losses = [float(line.split()[1]) for line in found.stdout.splitlines() if re.match(r" *\d", line)]
    assert len(losses) == 11 and losses[0] > 5 and losses[-1] < loss
    assert found.stdout.splitlines()[-1] == "largest difference: 0.0"


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_no_steps_are_named(steps: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import train_language_model as example

    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--steps", steps])
    monkeypatch.setattr(example, "launch", lambda target, job, ranks: [[]])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2 and f"--steps: got {steps}" in capsys.readouterr().err


def test_another_curve_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import train_language_model as example

    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--steps", "2"])
    monkeypatch.setattr(example, "launch", lambda target, job, ranks: [[5.0, 4.0 if ranks == 1 else 4.5]])
    assert example.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "largest difference: 0.5"
