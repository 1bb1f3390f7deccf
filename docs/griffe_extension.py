"""Reference of mkdocstrings: arguments as callers see them, and a row of the table for each."""

from __future__ import annotations

from typing import Any

from griffe import Class, Docstring, DocstringParameter, DocstringSectionKind, Extension, Function, Parameters

CATCHER = "unknown"  # moecomm.base.keywords.CATCHER: takes words that no argument has


class Arguments(Extension):
    """Leave out what takes misspelt words, and give arguments that a docstring describes together a row each."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Change a function."""
        func.parameters = Parameters(*(parameter for parameter in func.parameters if parameter.name != CATCHER))
        _split(func.docstring, func.parameters)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Change the arguments in the docstring of a class, which are those of its constructor."""
        constructor = cls.members.get("__init__")
        if isinstance(constructor, Function):
            _split(cls.docstring, constructor.parameters)


def _split(docstring: Docstring | None, parameters: Parameters) -> None:
    for section in docstring.parsed if docstring is not None else ():
        if section.kind is DocstringSectionKind.parameters:
            section.value = [one for together in section.value for one in _each(together, parameters)]


def _each(together: DocstringParameter, parameters: Parameters) -> list[DocstringParameter]:
    names = together.name.split(", ")
    if len(names) == 1:
        return [together]
    found = []
    for name in names:
        known = next((parameter for parameter in parameters if parameter.name == name), None)
        about = (known.annotation, known.default) if known is not None else (together.annotation, together.value)
        found.append(DocstringParameter(name, description=together.description, annotation=about[0], value=about[1]))
    return found
