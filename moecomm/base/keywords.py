"""The error for a keyword that a call does not have, which names the nearest one that it has."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])
CATCHER = "unknown"  # name of the parameter that takes such keywords: it is in no documentation


def hide_catcher(function: _Call) -> _Call:
    """Decorate a call that ends with `**unknown`, which inspect.signature() and help() then do not show."""
    shown = inspect.signature(function)
    own = [parameter for parameter in shown.parameters.values() if parameter.name != CATCHER]
    function.__signature__ = shown.replace(parameters=own)  # type: ignore[attr-defined]
    return function


def unexpected(call: Callable[..., Any], unknown: Collection[str]) -> TypeError:
    """Return Python's TypeError for the first of these keywords, with the nearest one of the call."""
    word = next(iter(unknown))
    near = difflib.get_close_matches(word, inspect.signature(call).parameters, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{call.__qualname__}() got an unexpected keyword argument {word!r}{meant}")
