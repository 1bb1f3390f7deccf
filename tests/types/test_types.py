"""Errors of mypy --strict in programs that use moecomm."""

from __future__ import annotations

import ast
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
from moecomm import Buffer, backends, overloads
from moecomm.base import choices, keywords, protocol
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


@pytest.mark.parametrize(
    ("signature", "options", "method"),
    [
        (overloads.Dispatch, overloads.DispatchOptions, Buffer.dispatch),
        (overloads.DispatchBegin, overloads.BeginOptions, Buffer.dispatch_begin),
        (overloads.Combine, overloads.CombineOptions, Buffer.combine),
        (overloads.Moe, overloads.MoeOptions, Buffer.moe),
    ],
)
def test_signatures_have_the_arguments_of_the_methods(signature: type, options: type, method: object) -> None:
    assert callable(method)
    of_method = [name for name in inspect.signature(method).parameters if name not in ("self", "buffer")]
    overloads = re.findall(r"def __call__\((.*?)\) ->", inspect.getsource(signature), re.DOTALL)
    assert overloads
    for overload in overloads:
        named = [name for name in re.findall(r"(\w+): ", overload) if name != "options"]
        assert set(named) | set(options.__annotations__ | typing.get_type_hints(options)) == set(of_method)


METHODS = [
    (Buffer.dispatch, dispatch_options.Options),
    (Buffer.dispatch_begin, dispatch_options.Options),
    (Buffer.combine, combine_options.Options),
    (Buffer.moe, layer_options.Options),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_signatures_in_the_source_have_every_option_with_its_default(method: Any, options: Any) -> None:
    """Editors and mkdocstrings read the source, help() the signature."""
    shown = inspect.signature(method).parameters
    defaults = {name: parameter.default for name, parameter in shown.items() if name in options._fields}
    assert defaults == options._field_defaults
    (written,) = [
        node
        for node in ast.walk(ast.parse((ROOT / "moecomm/buffer.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == method.__name__
    ]
    assert [argument.arg for argument in (*written.args.args, *written.args.kwonlyargs)] == list(shown)
    assert written.args.kwarg is not None and written.args.kwarg.arg == keywords.CATCHER
    assert [p.name for p in shown.values() if p.kind is p.VAR_KEYWORD] == []
    of_types = written.args.kwonlyargs
    annotated = {argument.arg: ast.unparse(argument.annotation) for argument in of_types if argument.annotation}
    own = {name: str(kind).replace("ForwardRef", "").strip("()'") for name, kind in options.__annotations__.items()}
    assert {name: annotated[name].replace("choices.", "") for name in options._fields} == own


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


@pytest.mark.parametrize(
    ("options", "typed", "apart"),
    [
        (dispatch_options.Options, dispatch_options.OptionsDict, {"layout", "quantize"}),
        (combine_options.Options, combine_options.OptionsDict, {"out", "bias", "topk_weights"}),
        (layer_options.Options, layer_options.OptionsDict, {"out", "bias", "dropped", "w13_bias", "w2_bias"}),
    ],
)
def test_type_checkers_see_the_options_of_a_call(options: typing.Any, typed: type, apart: set[str]) -> None:
    """`apart`: options on which types depend, and tensors on which they do not."""
    fields, keys = typing.get_type_hints(options), typing.get_type_hints(typed)
    assert set(fields) ^ set(keys) == apart
    assert all(fields[name] == keys[name] for name in set(fields) & set(keys))
