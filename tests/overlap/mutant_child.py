"""Runs random calls with a mutant of moecomm.overlap, or with none, and prints the operators that noticed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[2]))

import torch

from tests.overlap.mutants import MUTANTS, Mutant

SEEDS, RANKS = range(60), 3


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Loads one module of moecomm.overlap with an edit."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"moecomm.overlap.{self._mutant.module}":
            return None
        assert path is not None
        self._file = Path(path[0]) / f"{self._mutant.module}.py"
        return importlib.util.spec_from_loader(fullname, self)

    def get_source(self, fullname: str) -> str:
        source = self._file.read_text()
        assert source.count(self._mutant.old) == 1, f"{self._mutant.name}: the edit matches no place, or several"
        return source.replace(self._mutant.old, self._mutant.new)


def noticed(operator: str) -> bool:
    """Return whether some call has another result than the reference's, or fails."""
    from tests.overlap.cases import FP8, PRODUCTS
    from tests.overlap.many import run_cases

    try:
        for dtype in (None, FP8) if operator in PRODUCTS else (None,):
            run_cases(operator, RANKS, SEEDS, dtype)
    except Exception:  # noqa: BLE001 - whatever it is
        return True
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = [mutant.name for mutant in MUTANTS]
    if sys.argv[1] in names:
        sys.meta_path.insert(0, Mutated(MUTANTS[names.index(sys.argv[1])]))
    from tests.overlap.cases import OPERATORS

    print(*filter(noticed, OPERATORS), flush=True)
    os._exit(0)
