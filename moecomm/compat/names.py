"""Methods with the parameters of another library, written as one string."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(parameters: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a method these parameters.  The method gets all of them as keywords.

    Args:
        parameters: names in order, with defaults, as in "x topk_idx=None num_sms=0".
    """
    given = [one.partition("=") for one in parameters.split()]
    names = [name for name, _, _ in given]
    all_names = set(names)
    defaults = {name: ast.literal_eval(default) for name, _, default in given if default}
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, default=defaults.get(name, none)) for name in ("self", *names)]
    )

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def method(self: Any, *args: Any, **named: Any) -> Any:
            found = {**defaults, **named, **dict(zip(names, args, strict=False))}
            twice = named and not named.keys().isdisjoint(names[: len(args)])
            if twice or len(args) > len(names) or found.keys() != all_names:
                signature.bind(self, *args, **named)  # raises TypeError
            return call(self, **found)

        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return decorate
