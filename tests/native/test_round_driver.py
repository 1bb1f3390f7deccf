"""The host executor in C++: random rounds against an oracle, plain and under ThreadSanitizer, and rounds that fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ..few import few
from .build import Workshop

PLAIN_CASES = (500, 2_000)
DOMAIN_CASES = (60, 600)
TSAN_CASES = 400
DOMAIN_TSAN_CASES = 60
PROCESSES = 2
LONG = 4 * 3600  # seconds


def run(driver: Path, *commands: tuple[str, ...], timeout_s: int = 1800) -> None:
    """Runs the driver once for each command, all at once; every one must end well."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    started = [
        subprocess.Popen(
            [driver, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for command in commands
    ]
    for process in started:
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, output


def random_cases(cases: int) -> list[tuple[str, ...]]:
    share = cases // PROCESSES
    return [("--cases", str(share), "--seed", str(1 + i * share)) for i in range(PROCESSES)]


@pytest.mark.parametrize("cases", few(PLAIN_CASES, 500))
def test_random_rounds(cases: int, plain: Workshop) -> None:
    run(plain.intact, *random_cases(cases))


@pytest.mark.long
@pytest.mark.timeout(LONG)
def test_random_rounds_without_races(tsan: Workshop, pytestconfig: pytest.Config) -> None:
    cases = pytestconfig.getoption("--race-cases") or TSAN_CASES
    run(tsan.intact, *random_cases(cases), timeout_s=LONG)


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("cases", few(DOMAIN_CASES, 60))
def test_random_rounds_in_domains(cases: int, plain: Workshop, pytestconfig: pytest.Config) -> None:
    """Across links that delay what they move, and reorder what they may: `--domain-cases 116000` took 23 minutes."""
    commands = random_cases(pytestconfig.getoption("--domain-cases") or cases)
    run(plain.intact, *((*command, "--domains") for command in commands), timeout_s=LONG)


@pytest.mark.long
def test_random_rounds_in_domains_without_races(tsan: Workshop) -> None:
    run(tsan.intact, *((*case, "--domains") for case in random_cases(DOMAIN_TSAN_CASES)))


def test_failing_rounds_in_domains(plain: Workshop) -> None:
    run(plain.intact, ("--failures", "--domains"))


@pytest.mark.long
def test_failing_rounds(plain: Workshop) -> None:
    run(plain.intact, ("--failures",))


@pytest.mark.long
def test_failing_rounds_without_races(tsan: Workshop) -> None:
    run(tsan.intact, ("--failures",))


@pytest.mark.long
def test_failing_rounds_in_domains_without_races(tsan: Workshop) -> None:
    run(tsan.intact, ("--failures", "--domains"))
