"""Every seeded bug must make the driver fail, soon and by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .build import CSRC, PARALLEL, Workshop
from .domain_mutants import DOMAIN_MUTANTS
from .mutants import MUTANTS, Mutant

# No more than those that the intact driver passes, from the same seed on (test_round_driver.py).
CASES = {"plain": "400", "tsan": "200", "domains plain": "600", "domains tsan": "60"}
ALL = MUTANTS + DOMAIN_MUTANTS
TRIES = 3  # of a mutant: what only some order of events shows may be missed once, by a busy machine above all
Result = subprocess.CompletedProcess[str]


def run(driver: Path, caught_by: str) -> Result:
    several = ["--domains"] if caught_by.startswith("domains ") else []
    what = ["--failures", "--until-one"] if caught_by.endswith("failures") else ["--cases", CASES[caught_by]]
    return subprocess.run(
        [driver, *what, *several, "--timeout-ms", "2000"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )


class Trials:
    """Answers of the driver to mutants.  Most wait for a compiler or for a deadline: more are under way than there are
    cores.
    """

    def __init__(self, pool: ThreadPoolExecutor, workshop: Callable[[str], Workshop]) -> None:
        """`workshop`: "plain" or "tsan", which takes long to build."""
        self._pool, self._workshop = pool, workshop
        self._results: dict[str, Future[Result]] = {}

    def begin(self, mutant: Mutant) -> None:
        self._results[mutant.name] = self._pool.submit(self._try, mutant, self._of(mutant.caught_by))

    def begin_intact(self, caught_by: str) -> None:
        self._results[caught_by] = self._pool.submit(run, self._of(caught_by).intact, caught_by)

    def _of(self, caught_by: str) -> Workshop:
        return self._workshop("tsan" if caught_by.endswith("tsan") else "plain")

    def result(self, name: str) -> Result:
        return self._results[name].result()

    def _try(self, mutant: Mutant, workshop: Workshop) -> Result:
        driver = workshop.build(mutant)
        for _ in range(TRIES):
            result = run(driver, mutant.caught_by)
            if result.returncode != 0:
                break
        return result


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Iterator[Trials]:
    with ThreadPoolExecutor(2 * PARALLEL) as pool:
        begun = Trials(pool, request.getfixturevalue)
        for item in request.session.items:  # those that were asked for
            if isinstance(item, pytest.Function) and item.module is request.module and "trials" in item.fixturenames:
                given = item.callspec.params
                if "mutant" in given:
                    begun.begin(given["mutant"])
                else:
                    begun.begin_intact(given["caught_by"])
        yield begun
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_edit_is_unique(mutant: Mutant) -> None:
    assert (CSRC / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.long
@pytest.mark.parametrize("caught_by", ["failures", "domains failures"])
def test_intact_passes(caught_by: str, trials: Trials) -> None:
    """Run code that meets the deadline, with the one that mutants get, beside them."""
    result = trials.result(caught_by)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, trials: Trials) -> None:
    result = trials.result(mutant.name)
    assert result.returncode != 0, f"nobody noticed: {result.stdout}"
