"""Every mutant is caught by random calls of the operators that it names; without one, no operator notices anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moecomm

from .mutants import MUTANTS

BY_NAME = {mutant.name: mutant.operators for mutant in MUTANTS} | {"none": ()}


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_mutants_are_caught(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "mutant_child.py"), name],
        env={**os.environ, "PYTHONPATH": str(Path(moecomm.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == set(BY_NAME[name])
