"""python -m tests.slow JUNIT...: write tests/slow.txt, the tests that a plain run of everything leaves out.

They take longer than LIMIT_S on two cores, by the times in files of `pytest --junitxml FILE` and of `pytest -m slow
--junitxml FILE`.  `pytest -m slow` runs them, as does a run that names their file.  `.ci/run` runs them, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIMIT_S = 2.0
NAMES = Path(__file__).with_name("slow.txt")


@lru_cache(maxsize=1)
def names() -> frozenset[str]:
    """Return the identifiers of the tests."""
    return frozenset(NAMES.read_text().splitlines())


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the tests the marker `slow`."""
    for item in items:
        if item.nodeid in names():
            item.add_marker(pytest.mark.slow)


def measured(file: Path) -> dict[str, float]:
    """Return the seconds that each test took, by identifier."""
    found = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        path = str(case.get("classname")).replace(".", "/")
        found[f"{path}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def main(files: list[str]) -> None:
    """Write the names of tests over the limit, of all files together."""
    seconds = {name: taken for file in files for name, taken in measured(Path(file)).items()}
    NAMES.write_text("".join(f"{name}\n" for name in sorted(seconds) if seconds[name] > LIMIT_S))


if __name__ == "__main__":
    main(sys.argv[1:])
