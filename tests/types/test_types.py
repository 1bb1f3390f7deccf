"""Errors of mypy --strict in programs that use moecomm."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import moecomm
from moecomm import Buffer, backends
from moecomm.base import choices, protocol
from moecomm.combine import options as combine_options
from moecomm.dispatch import options as dispatch_options
from moecomm.fused import options as layer_options

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_mypy_refuses_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    """The snippets, and the example of README, which is a whole program."""
    checked = [tmp_path / "snippets.py"]
    checked[0].write_text((Path(__file__).parent / "snippets.py").read_text())
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    checked.append(tmp_path / "example.py")
    checked[-1].write_text(example)
    packages = Path(moecomm.__file__).parent.parent
    # Installed packages are found by themselves.  Of others mypy would report their own errors.
    where = {} if packages.name == "site-packages" else {"MYPYPATH": str(packages)}
    strict = ["--strict", "--follow-imports=silent", "--config-file="]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *strict, *map(str, checked)],
        cwd=tmp_path,
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_types_name_what_is_accepted() -> None:
    assert set(typing.get_args(choices.BackendName)) == {"auto", *backends.NAMES}
    assert set(typing.get_args(choices.ByExpert)) == set(protocol.LAYOUTS) - {"flat"}


METHODS = [
    (Buffer.dispatch, dispatch_options.Options),
    (Buffer.dispatch_begin, dispatch_options.Options),
    (Buffer.combine, combine_options.Options),
    (Buffer.moe, layer_options.Options),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_signatures_have_every_option_with_its_default(method: Any, options: Any) -> None:
    shown = inspect.signature(method).parameters
    defaults = {name: parameter.default for name, parameter in shown.items() if name in options._fields}
    assert defaults == options._field_defaults
    own = {name: str(kind).replace("ForwardRef", "").strip("()'") for name, kind in options.__annotations__.items()}
    assert {name: shown[name].annotation for name in options._fields} == own
    assert [p.name for p in shown.values() if p.kind is p.VAR_KEYWORD] == []


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_every_argument_has_a_row_in_the_docstring(method: Any, options: Any) -> None:
    args = (inspect.getdoc(method) or "").partition("\nArgs:")[2].partition("\n\n")[0]
    rows = [name for names in re.findall(r"^    (\w.*?): ", args, re.MULTILINE) for name in names.split(", ")]
    if method is Buffer.dispatch_begin:
        assert args == ' those of dispatch(), without `sync` and `overflow="chunks"`.'
    else:
        assert set(rows) == set(inspect.signature(method).parameters) - {"self"}


def test_type_checkers_see_every_argument_with_its_default() -> None:
    """In each overload, but for the arguments that it is about."""
    spec: Any = importlib.util.spec_from_file_location("signatures", ROOT / "signatures.py")
    signatures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signatures)
    stub = signatures.written(ROOT / "moecomm")
    built = Path(moecomm.__file__).parent / "buffer/overloads.pyi"
    assert not built.exists() or built.read_text() == stub, "an older one: build again"
    calls = {node.name: node.body[1:] for node in ast.parse(stub).body if isinstance(node, ast.ClassDef)}
    assert list(calls) == ["DispatchCall", "DispatchBeginCall", "CombineCall", "MoeCall", "StatsCall"]
    for method in (*(method for method, _ in METHODS), Buffer.stats):
        want = inspect.signature(method).parameters
        overloads = calls["".join(map(str.capitalize, method.__name__.split("_"))) + "Call"]
        for overload, (changed, _) in zip(overloads, signatures.CASES[method.__name__], strict=True):
            assert isinstance(overload, ast.FunctionDef)
            args = overload.args
            assert [argument.arg for argument in (*args.args, *args.kwonlyargs)] == list(want)
            defaults = {a.arg: value for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
            for name, value in defaults.items():
                assert name in changed or (value and ast.literal_eval(value)) == want[name].default


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_word_that_no_argument_has_is_named_with_the_call_and_the_nearest(method: Any, options: Any) -> None:
    buffer = Buffer("self", hidden=64, num_experts=4, topk=1, max_tokens=8, device="cpu")
    with buffer:
        given: list[Any] = [None] * sum(p.default is p.empty for p in inspect.signature(method).parameters.values())
        call = getattr(buffer, method.__name__)
        for word, near in ((f"{options._fields[-1]}s", options._fields[-1]), ("num_smss", "num_sms")):
            with pytest.raises(TypeError) as told:
                call(*given[1:], **{word: None})
            assert str(told.value) == (
                f"Buffer.{method.__name__}() got an unexpected keyword argument {word!r}; did you mean {near!r}?"
            )
        with pytest.raises(TypeError, match=r"argument 'xyzzy'$"):
            call(*given[1:], xyzzy=1)
        assert not buffer.failed
