"""A memory of calls whose arguments have passed all checks, by what the arguments say of themselves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Known(Generic[_Value]):
    """Values by key, of which the oldest go when there are too many.  Threads may share it.

    A key has all that a check looks at (tensors by _native.tensor_words), so equal keys pass the same checks.
    """

    def __init__(self, most: int = 1024) -> None:
        self._values: dict[Hashable, _Value] = {}
        self._most = most

    def get(self, key: Hashable) -> _Value | None:
        """Return the value of a key; None if there is none, or a part of the key can't be hashed."""
        try:
            return self._values.get(key)
        except TypeError:
            return None

    def add(self, key: Hashable, value: _Value) -> None:
        """Note a value, unless a part of its key can't be hashed."""
        try:
            hash(key)
        except TypeError:
            return
        if len(self._values) >= self._most:
            for old in list(self._values)[: self._most // 2]:
                self._values.pop(old, None)
        self._values[key] = value
