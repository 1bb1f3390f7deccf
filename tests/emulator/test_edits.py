"""Edits of the mutants, which long tests make: each must match one place of the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ..native.mutants import Mutant
from . import device_mutants, plain, plain_gemm, test_cast_mutants, test_changing_placements, test_gemm_mutants
from .units import CSRC


@pytest.mark.parametrize(
    ("write", "mutants"),
    [
        (plain.write, device_mutants.MUTANTS),
        (plain.write, test_cast_mutants.MUTANTS + test_cast_mutants.ON_THE_WAY),
        (plain.write, test_changing_placements.MUTANTS),
        (plain_gemm.write, test_gemm_mutants.MUTANTS),
    ],
    ids=["rounds", "casts", "placements", "products"],
)
def test_each_edit_matches_one_place(
    write: Callable[[Path, Path], None], mutants: Iterable[Mutant], tmp_path: Path
) -> None:
    write(CSRC, tmp_path)
    found = {mutant.name: (tmp_path / mutant.file).read_text().count(mutant.old) for mutant in mutants}
    assert set(found.values()) == {1}, found
