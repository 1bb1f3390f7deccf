"""Parsers of bytes from other processes under a coverage-guided fuzzer, with AddressSanitizer and UBSan.

docs/maintainers/testing.md says how to run it for long, and how the corpus grows.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .build import HERE, Fault, Fuzzer

pytestmark = pytest.mark.sanitized

CORPUS = HERE / "corpus.txt"
PARSERS = 5
INPUTS = 20_000  # 20 seconds
FAULTS = {
    "signals": Fault("rma_plugin/src/signals.cpp", " || !fits(at, sizeof(uint64_t), region->bytes)"),
    "ranks": Fault("rma_plugin/src/mesh.cpp", "hello.from < static_cast<int>(channels_.size()) && "),
    "windows": Fault("csrc/runtime/exchange.cpp", "message.from < 0 || message.from >= exchange_.ranks_ || "),
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzzer"))


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, words)], capture_output=True, text=True, timeout=240, check=False)


def test_the_corpus(fuzzer: Fuzzer) -> None:
    done = run(fuzzer.program, "replay", CORPUS)
    assert done.returncode == 0, done.stderr


def test_new_inputs(fuzzer: Fuzzer, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    done = run(fuzzer.program, "fuzz", CORPUS, INPUTS, seed)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_check_is_found(fuzzer: Fuzzer, fault: str, tmp_path: Path) -> None:
    """Starting from nothing but the numbers of the parsers."""
    seeds = tmp_path / "seeds.txt"
    seeds.write_text("".join(f"{parser:02x}\n" for parser in range(PARSERS)))
    done = run(fuzzer.with_fault(FAULTS[fault]), "fuzz", seeds, 200_000, 1)
    assert done.returncode == 1 and "\nbroke: " in done.stderr, done.stderr
