"""A tuple whose items are computed when they are read: documented contents of a handle that few callers look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moecomm.base.bound import Bound
from moecomm.dispatch.routed import ChunkedHandle, Handle
from moecomm.dispatch.tables import table


class LazyTuple(Bound, tuple[Any, ...]):
    """len(), indexing, slicing, iteration and unpacking, as of a tuple; an item is made once.  Equal to itself only.

    `makers`, of a subclass, make the items of an instance.
    """

    _instead = Handle._instead
    makers: tuple[Callable[[Any], Any], ...] = ()
    _items: dict[int, Any] | None = None  # until one is read

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if self._items is None:
            self._items = {}
        if index not in self._items:
            self._items[index] = self.makers[index](self)
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __contains__(self, item: object) -> bool:
        return any(item is mine for mine in self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"


def by_token(handle: Handle, name: str, columns: int) -> torch.Tensor:
    """int32 `[T, columns]`: a table of the route with a row for each token of this rank."""
    if isinstance(handle, ChunkedHandle):
        return torch.cat([by_token(chunk.handle, name, columns) for chunk in handle.chunks])
    shape = (handle.num_tokens, columns)
    if handle.num_tokens == 0:
        return torch.zeros(shape, dtype=torch.int32, device=handle.plan.device)
    return table(handle, getattr(handle.args.route, name), shape, torch.int32)
