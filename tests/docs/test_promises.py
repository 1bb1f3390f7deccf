"""Pages of promises: every test that they name is there, and every rule has a state."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
RULES = [*(f"R{number}" for number in range(1, 23)), *(f"S{number}" for number in range(1, 10))]
# A command as the pages have it: options of pytest, and a file or folder; or a module that is run.
COMMAND = re.compile(r"`((?:-m \w+ )?tests/[^`]*|python -m tests\.[^`]*)`")


def commands(page: str) -> list[str]:
    return list(dict.fromkeys(COMMAND.findall((DOCS / page).read_text())))


@cache
def sources_of(path: Path) -> dict[str, str]:
    """Source of each test, with its decorators, by name; of all files of a folder."""
    found = {}
    for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                lines = text.splitlines()[min(d.lineno for d in (*node.decorator_list, node)) - 1 : node.end_lineno]
                found[node.name] = "\n".join([*re.findall(r"^pytestmark = .*", text, re.MULTILINE), *lines])
    return found


@pytest.mark.parametrize("command", [*commands("failures.md"), *commands("maintainers/reliability.md")])
def test_what_a_command_runs_is_there(command: str) -> None:
    if module := re.match(r"python -m (\S+)", command):
        assert importlib.util.find_spec(module[1])
        return
    path, _, options = command.partition("tests/")[2].partition(" ")
    place = ROOT / "tests" / path
    assert place.exists()
    if place.suffix != ".py" and place.is_file():  # tests/gpu/run PART
        assert f'"{options}":' in (place.parent / "steps.py").read_text()
        return
    words = options.split()
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert named.keys() <= {"-k", "--repeats", "--cases", "--race-cases"}
    chosen = [source for name, source in sources_of(place).items() if named.get("-k", "") in name]
    marker = re.match(r"-m (\w+) ", command)
    assert any(runs_with(source, marker[1] if marker else "") for source in chosen)
    for option in named.keys() - {"-k", "--cases"}:
        assert any(f'"{option}"' in source for source in chosen)


def runs_with(source: str, marker: str) -> bool:
    """Return whether a test, or one of its cases, runs with `pytest -m marker`; "": without an option."""
    if marker:
        return f"pytest.mark.{marker}" in source or (marker == "long" and "few(" in source)
    return not re.search(r"pytest\.mark\.(long|sanitized)\b", source)


_INTERNALS = (
    *("architecture", "adding_an_option", "adding_a_weight_format", "fused_kernels", "kernels"),
    "what_ranks_compare",
)


@pytest.mark.parametrize(
    "page", ["failures.md", "maintainers/reliability.md", *(f"maintainers/{name}.md" for name in _INTERNALS)]
)
def test_paths_of_a_page_are_there(page: str) -> None:
    named = re.findall(r"`((?:tests|moecomm|bench|csrc|docs)/[\w./-]+)", (DOCS / page).read_text())
    not_there = {
        "moecomm/fused/NAME.py",
        "moecomm/_native.pyi",
        "moecomm/buffer/overloads.pyi",
    }  # a name, what the build makes
    assert named and [path for path in named if path not in not_there and not (ROOT / path).exists()] == []


def test_every_rule_is_met_or_has_a_reason() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in (DOCS / "maintainers" / "reliability.md").read_text().splitlines()
    ]
    rules = [row for row in rows if re.fullmatch(r"[RS]\d+", row[0])]
    assert [row[0] for row in rules] == RULES
    for _, rule, state, *rest in rules:
        assert rule.endswith(".") and state in ("met", "partly", "not")
        test = rest[0]
        assert COMMAND.search(test) and (state == "met" or "because" in rest[1]), rule


def test_every_fault_has_a_test_or_says_why_not() -> None:
    table = (DOCS / "failures.md").read_text().partition("## Fault by fault")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    assert [row[0] for row in rows[1:] if not (COMMAND.search(row[-1]) or row[-1].startswith("none: "))] == []
