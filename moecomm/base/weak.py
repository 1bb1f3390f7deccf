"""Objects that are found as long as others hold them.

They go without Python code: a signal handler that ran in such code, which the end of an object calls anywhere, would
raise an error that nobody gets, and Ctrl-C would be lost.  The callbacks of the module weakref are such code.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Object = TypeVar("_Object")


class WeakTable(Generic[_Key, _Object]):
    """Table of objects by key, with weak references to the objects.  Threads may share it."""

    def __init__(self) -> None:
        self._there: dict[_Key, weakref.ref[_Object]] = {}

    def add(self, key: _Key, found: _Object) -> None:
        """Add an object, in the place of any other of that key."""
        self._there[key] = weakref.ref(found, partial(self._there.pop, key))  # which ignores its second argument

    def get(self, key: _Key) -> _Object | None:
        """Return the object of a key, or None."""
        found = self._there.get(key)
        return None if found is None else found()

    def pop(self, key: _Key) -> None:
        """Remove an object, if it is there."""
        self._there.pop(key, None)

    def values(self) -> list[_Object]:
        """Return the objects that are there."""
        return [one for found in list(self._there.values()) if (one := found()) is not None]
