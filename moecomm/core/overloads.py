"""The types of a Buffer's calls whose results depend on their options.  For type checkers alone.

The methods of Buffer have the docstrings.  A tensor in means tensors out; any other array means Any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypedDict, TypeVar, overload

import torch
from typing_extensions import Unpack

from moecomm.core.choices import Activation, ByExpert, Layout, Quantize, ScaleFormat, ScaleLayout
from moecomm.routed import Handle, Routed

T = torch.Tensor
_Signature = TypeVar("_Signature")


def typed(signature: Callable[..., _Signature]) -> Callable[[Callable[..., Any]], _Signature]:
    """Decorates a method that type checkers see with another signature.  Returns the method as it is."""

    def decorate(function: Callable[..., Any]) -> Any:
        return function

    return decorate


class BeginOptions(TypedDict, total=False):
    """Options of dispatch_begin() on which the types of its result do not depend."""

    expert_alignment: int
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    max_rows: int | None
    num_sms: int | None
    check_weights: bool


class DispatchOptions(BeginOptions, total=False):
    """Likewise of dispatch()."""

    sync: bool | None


class CombineOptions(TypedDict, total=False):
    """Likewise of combine()."""

    out: Any
    bias: Any
    weighted: bool
    wire: torch.dtype | None
    num_sms: int | None
    topk_weights: Any


class MoeOptions(TypedDict, total=False):
    """Likewise of moe()."""

    activation: Activation
    interleaved: bool
    out: Any
    bias: Any
    max_rows: int | None
    wire: torch.dtype | None
    num_sms: int | None
    check_weights: bool
    fused: bool | None


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
