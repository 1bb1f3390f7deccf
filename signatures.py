"""Writes moecomm/buffer/overloads.pyi: calls of a Buffer for type checkers, an overload for each kind of result.

A call has the arguments of its `def` in moecomm/buffer/__init__.py, and the fields of the class of options that
moecomm/buffer/overloads.py names.  Which types of results depend on which arguments is here.  Tensors in mean tensors
out; any other array means Any.  setup.py runs this; it imports nothing of moecomm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HEAD = """\
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, overload

import torch

from moecomm.base import choices
from moecomm.base.choices import *
from moecomm.observe.stats import JobStats, Stats
from moecomm.dispatch.routed import Handle, Routed

T = torch.Tensor
"""
_NEW = {"x": "T", "topk_idx": "Any", "handle": "None = None"}  # a dispatch that repeats no other
_NONE = "None = None"
_SCALES = [(_NONE, _NONE, "None"), ("Quantize", _NONE, "T"), (_NONE, "T", "T")]
_ROUTED = [
    *(
        ({**_NEW, "layout": layout, "quantize": quantize, "scales": given}, f"Routed[T, {scales}, {rows}]")
        for layout, rows in (('ByExpert = "expert"', "None, T"), ('Literal["flat"]', "T, None"))
        for quantize, given, scales in _SCALES
    ),
    ({"x": "T"}, "Routed"),
    ({}, "Routed[Any, Any, Any, Any]"),
]
# Of each call: types of arguments where they differ from those in the source, with defaults, and that of the result.
CASES: dict[str, list[tuple[dict[str, str], str]]] = {
    "dispatch": _ROUTED,
    "dispatch_begin": _ROUTED,
    "combine": [
        ({"y": "T", "weight_grads": _NONE}, "T"),
        ({"y": "T", "weight_grads": "T"}, "tuple[T, T]"),
        ({}, "Any"),
    ],
    "moe": [({"x": "T"}, "T"), ({}, "Any")],
    "stats": [
        ({"gather": "Literal[False] = False"}, "Stats"),
        ({"gather": "Literal[True]"}, "JobStats"),
        ({}, "Stats | JobStats"),
    ],
}


def written(package: Path) -> str:
    """Return the text of overloads.pyi."""
    rooms, lines = rooms_of_options(package), [HEAD]
    for node in ast.walk(ast.parse((package / "buffer/__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in CASES:
            lines += _call(node, dict(_fields(package / rooms[node.name])) if node.name in rooms else {})
    return "\n".join(lines)


def rooms_of_options(package: Path) -> dict[str, str]:
    """Return the file of the options of each call, by moecomm/buffer/overloads.py."""
    overloads = (package / "buffer/overloads.py").read_text(encoding="utf-8")
    rooms = {name: room for room, name in re.findall(r"^from moecomm\.(\w+) import options as (\w+)$", overloads, re.M)}
    calls = re.findall(r"^(\w+) = typed\((\w+)\.Options\)$", overloads, re.M)
    return {call: f"{rooms[name]}/options.py" for call, name in calls}


def _call(node: ast.FunctionDef, options: dict[str, str]) -> Iterator[str]:
    name = "".join(word.capitalize() for word in (*node.name.split("_"), "call"))
    yield f'class {name}(Protocol):\n    """Buffer.{node.name}."""'
    for given, result in CASES[node.name]:
        args = node.args
        first = list(zip(args.args, [None] * (len(args.args) - len(args.defaults)) + args.defaults, strict=True))
        shown = {arg.arg: _shown(arg.annotation, default) for arg, default in first[1:]} | {"*": ""}
        shown |= {
            arg.arg: _shown(arg.annotation, value) for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        }
        shown |= options | given
        parameters = ", ".join(f"{argument}: {kind}" if kind else argument for argument, kind in shown.items())
        yield f"    @overload\n    def __call__(self, {parameters}) -> {result}: ..."
    yield f"\ndef {node.name}(call: Callable[..., Any], /) -> {name}: ...\n"


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Options":
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield ast.unparse(field.target), _shown(field.annotation, field.value)


def _shown(annotation: ast.expr | None, default: ast.expr | None) -> str:
    return ast.unparse(annotation or ast.Name("Any")) + (f" = {ast.unparse(default)}" if default else "")
