"""The list of tests that a plain run leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import slow

ROOT = Path(__file__).resolve().parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.emulator.test_overlap" name="test_rounds[2]" time="{}" />
<testcase classname="tests.test_random" name="test_cases[few]" time="{}" />
<testcase classname="tests.test_random" name="test_many[1]" time="{}" />
<testcase classname="tests.test_random" name="test_many[2]" time="{}" />
</testsuite></testsuites>"""


def test_every_test_of_the_list_is_there() -> None:
    for name in slow.names():
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name


class Marked(list[str]):
    """An item of pytest, with the names of its markers."""

    nodeid = "tests/test_any.py::test_any[case]"

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self else None

    def add_marker(self, mark: Any) -> None:
        self.append(mark.name)


def test_long_cases_of_a_slow_test_are_long_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "names", lambda: {"tests/test_any.py::test_any"})
    items: Any = [Marked(["long"]), Marked()]
    slow.mark(items)
    assert items == [["long"], ["slow"]]


def test_the_list_has_what_took_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "NAMES", tmp_path / "slow.txt")
    plain, others = tmp_path / "plain.xml", tmp_path / "slow.xml"
    plain.write_text(REPORT.format(slow.LIMIT_S + 0.1, 0.1, 0.1, slow.CASES_S))
    others.write_text(
        REPORT.replace("test_rounds[2]", "test_rounds[3]").format(slow.LIMIT_S + 1, slow.LIMIT_S, 0.1, 10)
    )
    slow.main([str(plain), str(others)])
    overlap, random = "tests/emulator/test_overlap.py::test_rounds", "tests/test_random.py::test_many"
    assert slow.NAMES.read_text() == f"{overlap}[2]\n{overlap}[3]\n{random}\n"
