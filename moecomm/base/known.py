"""Memories of calls whose arguments have passed all checks.

Keys are typed: True equals 1, and 1.0, but passes other checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

import torch

_Value = TypeVar("_Value")


class Known(Generic[_Value]):
    """Values by key, of which the oldest go when there are too many.  Threads may share it.

    A key has all that a check looks at (tensors by _native.tensor_words), so equal keys pass the same checks.
    """

    def __init__(self, most: int = 1024) -> None:
        self._values: dict[tuple[Any, ...], _Value] = {}
        self._most = most

    def get(self, key: tuple[Any, ...]) -> _Value | None:
        """Return the value of a key; None if there is none, or a part of the key can't be hashed."""
        try:
            return self._values.get((key, *map(type, key)))
        except TypeError:
            return None

    def add(self, key: tuple[Any, ...], value: _Value) -> None:
        """Note a value, unless a part of its key can't be hashed."""
        typed = (key, *map(type, key))
        try:
            hash(typed)
        except TypeError:
            return
        if len(self._values) >= self._most:
            for old in list(self._values)[: self._most // 2]:
                self._values.pop(old, None)
        self._values[typed] = value


def checked_once(check: Callable[..., _Value], *words: Any) -> _Value:
    """Return `check(*words)`, which looks at words and numbers alone; from memory if it has passed before."""
    if torch.compiler.is_compiling():
        return check(*words)
    try:
        return cast("_Value", _checked(check, *words))
    except TypeError:  # not hashable: the check says which argument
        return check(*words)


@lru_cache(maxsize=1024, typed=True)
def _checked(check: Callable[..., object], *words: Any) -> object:
    return check(*words)
