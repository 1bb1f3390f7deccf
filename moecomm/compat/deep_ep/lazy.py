"""A tuple whose items are computed when they are read: documented contents of a handle that few callers look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moecomm.core.arrays import window_tensor
from moecomm.routed import Handle


class LazyTuple(tuple[Any, ...]):
    """len(), indexing, slicing, iteration and unpacking, as of a tuple; an item is made once.  Equal to itself only.

    `makers`, of a subclass, make the items of an instance.
    """

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


def kept(handle: Handle, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over what a moecomm handle keeps in the window; it keeps that alive."""
    return window_tensor(handle.block, address, shape, dtype, handle.plan.device, handle.plan.owner)


def source(handle: Handle) -> torch.Tensor:
    """int32 `[rows, 2]` or `[E/R, R * max_tokens, 2]`: source rank and token of each row."""
    args, plan = handle.args, handle.plan
    return kept(handle, plan.base + args.out_src, (*plan.rows_shape(args), 2), torch.int32)


def num_rows(handle: Handle) -> torch.Tensor:
    """int32 `[1]`: rows in use."""
    return kept(handle, handle.args.num_rows, (1,), torch.int32)


def tokens_per_expert(handle: Handle) -> torch.Tensor:
    """int32 `[E/R]`."""
    return kept(handle, handle.args.tokens_per_expert, (handle.plan.local_experts,), torch.int32)


def tokens_of_ranks(handle: Handle) -> torch.Tensor:
    """int32 `[R]`: how many tokens each rank passed to the dispatch."""
    return kept(handle, handle.args.route.sent, (handle.rounds.num_ranks, 2), torch.int32)[:, 0]
