"""Calls that end with `**options`: fields of a NamedTuple, which alone has their names, types, defaults and meanings.

Callers see them in the signature and in the docstring, and the nearest one where they misspell a word.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

_ROW = re.compile(r"^( +)\*\*options: .*\n?", re.MULTILINE)  # of the docstring of a call, in whose place options go


def show_options(call: Callable[..., Any], options: Any) -> None:
    """Show the fields of `options` in the signature of a call, and in its docstring."""
    shown = inspect.signature(call)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    for name, annotation in options.__annotations__.items():
        about = {
            "default": options._field_defaults[name],
            "annotation": getattr(annotation, "__forward_arg__", annotation),
        }
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **about))
    call.__signature__ = shown.replace(parameters=own)  # type: ignore[attr-defined]
    rows = inspect.cleandoc(options.__doc__ or "").partition("Args:\n")[2] + "\n"
    call.__doc__ = _ROW.sub(lambda row: re.sub(r"^ {4}", row[1], rows, flags=re.MULTILINE), call.__doc__ or "")


def unexpected(call: Callable[..., Any], given: Iterable[str]) -> TypeError:
    """Return Python's TypeError for the first of these keywords that a call does not have, with the nearest one."""
    known = inspect.signature(call).parameters
    word = next(word for word in given if word not in known)
    near = difflib.get_close_matches(word, known, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{call.__qualname__}() got an unexpected keyword argument {word!r}{meant}")
