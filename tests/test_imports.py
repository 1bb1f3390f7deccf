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


IN_FORKS = """
import os, sys
from importlib import import_module

import torch  # once, which takes longest

for name in sys.argv[1:]:
    if os.fork() == 0:
        import_module(name)
        assert __import__(name, fromlist=["__doc__"]) is sys.modules[name]
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(name)
"""


def test_each_module_of_the_reference_is_imported_by_its_name() -> None:
    """First of all modules of moecomm."""
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in (ROOT / "docs/api").glob("*.md")]
    names = sorted(title for title in titles if title.startswith("moecomm"))
    assert {"moecomm", "moecomm.nn"} <= set(names)
    ran = run_python("-c", IN_FORKS, *names)
    assert ran.returncode == 0, ran.stderr


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
