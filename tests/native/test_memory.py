"""The host executor under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .build import ASAN, CSRC, Workshop
from .memory_mutants import MEMORY_MUTANTS
from .mutants import Mutant
from .test_round_driver import random_cases, run

pytestmark = pytest.mark.sanitized

CASES = 500
DOMAIN_CASES = 80


@pytest.fixture(scope="module")
def asan(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("asan"), ASAN)


def domain_cases(cases: int) -> list[tuple[str, ...]]:
    return [(*case, "--domains") for case in random_cases(cases)]


def test_random_rounds(asan: Workshop) -> None:
    run(asan.intact, *random_cases(CASES), *domain_cases(DOMAIN_CASES))


def test_failing_rounds(asan: Workshop) -> None:
    run(asan.intact, ("--failures",), ("--failures", "--domains"))


@pytest.mark.parametrize("mutant", MEMORY_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, asan: Workshop) -> None:
    """By a sanitizer, in the first of the cases that the intact driver passes."""
    assert (CSRC / mutant.file).read_text().count(mutant.old) == 1
    driver: Path = asan.build(mutant)
    case = (domain_cases if mutant.caught_by.startswith("domains ") else random_cases)(DOMAIN_CASES)[0]
    done = subprocess.run([driver, *case], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr or "runtime error: " in done.stderr, done.stdout + done.stderr
