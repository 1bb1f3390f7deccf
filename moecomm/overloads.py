"""Types of the calls of a Buffer whose results depend on their options, for type checkers.

The methods of Buffer have the docstrings.  Tensors in mean tensors out; any other array means Any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from typing_extensions import Unpack

from moecomm.base.choices import ByExpert, Layout, Quantize
from moecomm.base.keywords import hide_catcher
from moecomm.combine.options import OptionsDict as CombineOptions
from moecomm.dispatch.options import OptionsDict
from moecomm.fused.options import OptionsDict as MoeOptions
from moecomm.observe.stats import JobStats, Stats
from moecomm.rounds.state import not_traced
from moecomm.routed import Handle, Routed

T = torch.Tensor
_Signature = TypeVar("_Signature")


def typed(signature: Callable[..., _Signature]) -> Callable[[Callable[..., Any]], _Signature]:
    """Decorate a method that type checkers see with another signature."""

    def decorate(function: Callable[..., Any]) -> Any:
        not_traced(function)
        return hide_catcher(function)

    return decorate


class BeginOptions(OptionsDict, total=False):
    """Options of dispatch_begin() on which the types of its result do not depend."""

    extras: Sequence[Any]
    x_global_scale: Any
    max_rows: int | None


class DispatchOptions(BeginOptions, total=False):
    """Likewise of dispatch()."""

    sync: bool | None


class Dispatch(Protocol):
    """Buffer.dispatch."""

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: None = None,
        scales: None = None,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, None, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: Quantize,
        scales: None = None,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, T, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: None = None,
        scales: T,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, T, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: None = None,
        scales: None = None,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, None, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: Quantize,
        scales: None = None,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, T, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: None = None,
        scales: T,
        handle: None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[T, T, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        quantize: Quantize | None = None,
        scales: Any = None,
        handle: Handle | None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed: ...

    @overload
    def __call__(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        quantize: Quantize | None = None,
        scales: Any = None,
        handle: Handle | None = None,
        **options: Unpack[DispatchOptions],
    ) -> Routed[Any, Any, Any, Any]: ...


class DispatchBegin(Protocol):
    """Buffer.dispatch_begin."""

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: None = None,
        scales: None = None,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, None, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: Quantize,
        scales: None = None,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, T, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: ByExpert = "expert",
        quantize: None = None,
        scales: T,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, T, None, T]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: None = None,
        scales: None = None,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, None, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: Quantize,
        scales: None = None,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, T, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        layout: Literal["flat"],
        quantize: None = None,
        scales: T,
        handle: None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[T, T, T, None]: ...

    @overload
    def __call__(
        self,
        x: T,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        quantize: Quantize | None = None,
        scales: Any = None,
        handle: Handle | None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed: ...

    @overload
    def __call__(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        quantize: Quantize | None = None,
        scales: Any = None,
        handle: Handle | None = None,
        **options: Unpack[BeginOptions],
    ) -> Routed[Any, Any, Any, Any]: ...


class Combine(Protocol):
    """Buffer.combine."""

    @overload
    def __call__(self, y: T, handle: Handle, *, weight_grads: None = None, **options: Unpack[CombineOptions]) -> T: ...
    @overload
    def __call__(self, y: T, handle: Handle, *, weight_grads: T, **options: Unpack[CombineOptions]) -> tuple[T, T]: ...
    @overload
    def __call__(
        self, y: Any, handle: Handle, *, weight_grads: Any = None, **options: Unpack[CombineOptions]
    ) -> Any: ...


class Moe(Protocol):
    """Buffer.moe."""

    @overload
    def __call__(
        self, x: T, topk_idx: Any, topk_weights: Any, w13: Any, w2: Any, **options: Unpack[MoeOptions]
    ) -> T: ...
    @overload
    def __call__(
        self, x: Any, topk_idx: Any, topk_weights: Any, w13: Any, w2: Any, **options: Unpack[MoeOptions]
    ) -> Any: ...


class Counters(Protocol):
    """Buffer.stats."""

    @overload
    def __call__(self, *, gather: Literal[False] = False, reset: bool = False) -> Stats: ...
    @overload
    def __call__(self, *, gather: Literal[True], reset: bool = False) -> JobStats: ...
    @overload
    def __call__(self, *, gather: bool, reset: bool = False) -> Stats | JobStats: ...
