"""python -m tests.slow JUNIT...: write tests/slow.txt, the tests that a plain run of everything leaves out.

They take longer than LIMIT_S on two cores, or all cases of a test take longer than CASES_S together, by the times in
files of `pytest --junitxml FILE` and of `pytest -m slow --junitxml FILE`.  `pytest -m slow` runs them, as does a run
that names their file.  `.ci/run` runs them, too.  A test whose fixture takes long has the marker in its file.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIMIT_S, CASES_S = 1.2, 8.0
NAMES = Path(__file__).with_name("slow.txt")


@lru_cache(maxsize=1)
def names() -> frozenset[str]:
    """Return the identifiers of the tests."""
    return frozenset(NAMES.read_text().splitlines())


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the tests the marker `slow`, without cases that are `long`."""
    for item in items:
        named = item.nodeid in names() or item.nodeid.partition("[")[0] in names()
        if named and item.get_closest_marker("long") is None:
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
    of_cases = Counter[str]()
    for name, taken in seconds.items():
        of_cases[name.partition("[")[0]] += taken
    whole = {name for name, taken in of_cases.items() if taken > CASES_S}
    single = {name for name, taken in seconds.items() if taken > LIMIT_S and name.partition("[")[0] not in whole}
    NAMES.write_text("".join(f"{name}\n" for name in sorted(whole | single)))


if __name__ == "__main__":
    main(sys.argv[1:])
