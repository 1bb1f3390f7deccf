"""Every seeded bug must make the driver fail, soon and by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .build import CSRC, TSAN, compile_units, driver_sources, executor_sources, link
from .mutants import MUTANTS, Mutant

PLAIN = ("-O1",)
CASES = {"plain": "400", "tsan": "200"}


def run(driver: Path, caught_by: str) -> subprocess.CompletedProcess[str]:
    command = ["--failures"] if caught_by == "failures" else ["--cases", CASES[caught_by]]
    return subprocess.run(
        [driver, *command, "--timeout-ms", "2000"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )


class Workshop:
    """The driver as it is, in objects; a mutant replaces only those that its edit changes."""

    def __init__(self, directory: Path, flags: tuple[str, ...]) -> None:
        self.directory, self.flags = directory, flags
        self.executor = {
            path.stem: path for path in compile_units(executor_sources(), CSRC, directory / "executor", flags)
        }
        self.tests = compile_units(driver_sources(), CSRC, directory / "tests", flags)

    def build(self, mutant: Mutant | None) -> Path:
        here = self.directory / (mutant.name.replace(" ", "_") if mutant else "intact")
        objects = dict(self.executor)
        if mutant is not None:
            csrc = here / "csrc"
            shutil.copytree(CSRC / "protocol", csrc / "protocol")
            shutil.copytree(CSRC / "host", csrc / "host")
            edited = csrc / mutant.file
            edited.write_text(edited.read_text().replace(mutant.old, mutant.new))
            changed = [edited] if edited.suffix == ".cpp" else self.users_of(edited.name, csrc)
            objects.update({path.stem: path for path in compile_units(changed, csrc, here, self.flags)})
        here.mkdir(exist_ok=True)
        return link([*objects.values(), *self.tests], here / "round_driver", self.flags)

    @staticmethod
    def users_of(header: str, csrc: Path) -> list[Path]:
        """The units that include a header, directly or through others."""
        units = []
        for unit in executor_sources(csrc):
            listed = subprocess.run(
                ["g++", "-std=c++17", "-MM", f"-I{csrc}", str(unit)], capture_output=True, text=True, check=True
            )
            if any(Path(name).name == header for name in listed.stdout.split()):
                units.append(unit)
        return units


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workshop]:
    made: dict[bool, Workshop] = {}

    def get(caught_by: str) -> Workshop:
        tsan = caught_by == "tsan"
        if tsan not in made:
            made[tsan] = Workshop(tmp_path_factory.mktemp(caught_by), TSAN if tsan else PLAIN)
        return made[tsan]

    return get


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_edit_is_unique(mutant: Mutant) -> None:
    assert (CSRC / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.parametrize("caught_by", ["plain", "tsan", "failures"])
def test_intact_passes(caught_by: str, workshop: Callable[[str], Workshop]) -> None:
    result = run(workshop(caught_by).build(None), caught_by)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, workshop: Callable[[str], Workshop]) -> None:
    result = run(workshop(mutant.caught_by).build(mutant), mutant.caught_by)
    assert result.returncode != 0, f"nobody noticed: {result.stdout}"
