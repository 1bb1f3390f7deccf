"""Imports go down only: among modules, rooms and folders of csrc, imports for type checkers included.

A room is a folder of moecomm, or a file beside them.  moecomm_bench is above all of them.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .fresh_python import run_python

ROOT = Path(__file__).parents[1]
PATHS = sorted(path for package in ("moecomm", "moecomm_bench") for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}


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


def room(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("moecomm.") else 1])


def test_no_module_and_no_room_imports_itself_by_way_of_others() -> None:
    modules = imported(MODULES)
    rooms: dict[str, set[str]] = {}
    for module, named in modules.items():
        if module != "moecomm":
            rooms.setdefault(room(module), set()).update(map(room, named))
    assert "moecomm.rounds.state" in modules and {"moecomm.base", "moecomm.rounds"} <= rooms["moecomm.dispatch"]
    for graph in (modules, {name: below - {name} for name, below in rooms.items()}):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("page", sorted((ROOT / "docs/api").glob("*.md")), ids=lambda page: page.stem)
def test_each_module_of_the_reference_is_imported_by_its_name(page: Path) -> None:
    name = page.read_text().partition("\n")[0].removeprefix("# ")
    if name.startswith("moecomm"):
        code = f"import {name}; from {name} import __doc__; assert {name} is __import__('sys').modules['{name}']"
        imported = run_python("-c", code)
        assert imported.returncode == 0, imported.stderr


def test_nothing_of_moecomm_imports_what_measures_it() -> None:
    assert not any(
        name.startswith("moecomm_bench")
        for module, names in imported(MODULES).items()
        for name in names
        if not module.startswith("moecomm_bench")
    )


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
