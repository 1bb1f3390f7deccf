"""The stub that the build writes beside the native module."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from moecomm import _native

STUB = Path(__file__).parents[1] / "csrc" / "bindings" / "stub.py"


@pytest.fixture(scope="module")
def tree() -> ast.Module:
    spec: Any = importlib.util.spec_from_file_location("stub", STUB)
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    written = stub.stub(_native)
    beside = Path(_native.__file__).parent / "_native.pyi"
    if beside.exists():
        assert beside.read_text() == written, "an older one: build again"
    return ast.parse(written)


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def named(body: list[ast.stmt]) -> set[str]:
    """Names of functions, classes, attributes and numbers."""
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | set(
        map(ast.unparse, targets)
    )


def test_the_stub_names_all_of_the_module(tree: ast.Module) -> None:
    assert public(vars(_native)) == named(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assert public(vars(getattr(_native, node.name))) == public(named(node.body)), node.name


def test_every_argument_and_result_has_a_type(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert all(argument.annotation for argument in arguments if argument.arg != "self"), node.name
            assert node.returns is not None, node.name
            assert node.args.kwarg is None, f"{node.name}: pybind11 knows no signature"


def test_no_two_functions_have_one_name(tree: ast.Module) -> None:
    """pybind11 would take the first whose arguments fit, whichever a caller means.  Launches alone have two forms."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    overloaded = {node.name for node in functions if any("overload" in ast.unparse(one) for one in node.decorator_list)}
    assert overloaded == {"__call__", "cuda_launch"}
