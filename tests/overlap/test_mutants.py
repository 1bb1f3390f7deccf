"""Every mutant is caught by random calls of the operators that it names; without one, no operator notices anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm import overlap

from ..fresh_python import run_python
from .mutants import MUTANTS

BY_NAME = {mutant.name: mutant.operators for mutant in MUTANTS} | {"none": ()}


def test_each_edit_matches_one_place() -> None:
    of_overlap = Path(overlap.__file__).parent
    found = {mutant.name: (of_overlap / f"{mutant.module}.py").read_text().count(mutant.old) for mutant in MUTANTS}
    assert set(found.values()) == {1}, found


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_mutants_are_caught(name: str) -> None:
    ran = run_python(Path(__file__).parent / "mutant_child.py", name, timeout_s=250)
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == set(BY_NAME[name])
