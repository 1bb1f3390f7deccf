"""Modules of moecomm, and folders of csrc, import each other in one direction, imports for type checkers included."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(modules: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each module names in an import, wherever in its text.  Not the top package, which re-exports."""
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [name if name in modules else str(node.module) for name in inside]
            else:
                continue
            found[module] |= {name for name in named if name in modules and name not in (module, "moecomm")}
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = sorted((ROOT / "moecomm").rglob("*.py"))
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    assert "moecomm.core.rounds" in modules
    try:
        TopologicalSorter(imported(modules)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_core_knows_no_round() -> None:
    paths = (ROOT / "moecomm" / "core").glob("*.py")
    text = {path.name: path.read_text() for path in paths}
    above = ("buffer", "routed", "dispatch", "combine", "fused", "ops", "nn", "backends", "jit")
    named = {name: [room for room in above if f"from moecomm.{room}" in lines] for name, lines in text.items()}
    assert {name: rooms for name, rooms in named.items() if rooms} == {}


def folder_includes() -> dict[str, set[str]]:
    """The folders of csrc that each folder includes from.  A folder in another is one of its own."""
    csrc = ROOT / "csrc"
    found: dict[str, set[str]] = {}
    for path in (path for path in csrc.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")):
        room = found.setdefault(path.parent.relative_to(csrc).as_posix(), set())
        for included in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.MULTILINE):
            target = (path.parent / included).resolve()
            assert target.is_file(), f"{path} includes {included}, which is not relative to its folder"
            if target.parent != path.parent:
                room.add(target.parent.relative_to(csrc).as_posix())
    return found


def test_no_folder_of_csrc_includes_itself_by_way_of_others() -> None:
    found = folder_includes()
    assert found["combine"] == {"device", "transport"} and found["protocol"] == set()
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
