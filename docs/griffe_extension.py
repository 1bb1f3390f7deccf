"""Reference of mkdocstrings: arguments as callers see them, and a row of the table for each."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from griffe import (
    Class,
    Docstring,
    DocstringParameter,
    DocstringSectionKind,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)

ROOT = Path(__file__).parent.parent
OPTIONS = "**options"  # of a call: stands for the fields of the class that moecomm/buffer/overloads.py names


class Arguments(Extension):
    """Give arguments that a docstring describes together a row each, and options theirs."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Put the fields of options in the place of `**options`."""
        for name, file in _signatures().rooms_of_options(ROOT / "moecomm").items():
            _show_options(pkg[f"buffer.Buffer.{name}"], pkg[file.removesuffix(".py").replace("/", ".")]["Options"])

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Change a function."""
        takes = any(str(decorator.value).startswith("takes(") for decorator in func.decorators)
        if takes and func.module.path.startswith("moecomm.compat."):  # integrations import what may not be here
            func.parameters = _taken(func)
        _split(func.docstring, func.parameters)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Change the arguments in the docstring of a class, which are those of its constructor."""
        constructor = cls.members.get("__init__")
        if isinstance(constructor, Function):
            _split(cls.docstring, constructor.parameters)


def _signatures() -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("signatures", ROOT / "signatures.py")
    signatures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signatures)
    return signatures


def _show_options(call: Function, options: Class) -> None:
    fields = [member for member in options.members.values() if member.is_attribute and member.value is not None]
    named = [
        Parameter(f.name, annotation=f.annotation, kind=ParameterKind.keyword_only, default=f.value) for f in fields
    ]
    call.parameters = Parameters(*(one for one in call.parameters if one.name != "options"), *named)
    (rows,) = (section.value for section in options.docstring.parsed if section.kind is DocstringSectionKind.parameters)
    rows = [one for together in rows for one in _each(together, call.parameters)]
    for section in call.docstring.parsed:
        if section.kind is DocstringSectionKind.parameters:
            section.value = [one for own in section.value for one in (rows if own.name == OPTIONS else [own])]


def _taken(func: Function) -> Parameters:
    """Return the parameters of a method that moecomm.compat.names.takes() decorates."""
    kind = getattr(importlib.import_module(func.module.path), func.parent.name)
    given = inspect.signature(getattr(kind, func.name)).parameters.values()
    found = []
    for one in given:
        default = None if one.default is one.empty else repr(one.default)
        found.append(Parameter(one.name, kind=ParameterKind.positional_or_keyword, default=default))
    return Parameters(*found)


def _split(docstring: Docstring | None, parameters: Parameters) -> None:
    for section in docstring.parsed if docstring is not None else ():
        if section.kind is DocstringSectionKind.parameters:
            section.value = [one for together in section.value for one in _each(together, parameters)]


def _each(together: DocstringParameter, parameters: Parameters) -> list[DocstringParameter]:
    names = together.name.split(", ")
    if len(names) == 1 and together.annotation is not None:
        return [together]
    found = []
    for name in names:
        known = next((parameter for parameter in parameters if parameter.name == name), None)
        about = (known.annotation, known.default) if known is not None else (together.annotation, together.value)
        found.append(DocstringParameter(name, description=together.description, annotation=about[0], value=about[1]))
    return found
