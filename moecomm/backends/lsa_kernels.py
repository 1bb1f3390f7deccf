"""The kernel for a round: found by the few arguments it is compiled for, so that a repeated round costs one look-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moecomm import _native

if TYPE_CHECKING:
    from moecomm import jit


class Kernels:
    """The kernels of one Buffer, compiled or read from the cache when first wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: dict[tuple[object, ...], jit.Kernel] = {}

    def dispatch(self, args: _native.DispatchArgs) -> jit.Kernel:
        """The dispatch kernel for these arguments."""
        key = (
            "dispatch",
            args.layout,
            args.in_type,
            args.idx_bytes,
            args.quantize,
            args.repeat,
            args.hidden,
            args.row_bytes,
            args.scale_bytes,
        )
        kernel = self._loaded.get(key)
        if kernel is None:
            kernel = self._loaded[key] = _load(dispatch_spec(args), self._device)
        return kernel

    def combine(self, args: _native.CombineArgs) -> jit.Kernel:
        """The combine kernel for these arguments."""
        key = ("combine", args.layout, args.type, args.wire, args.weighted, args.hidden)
        kernel = self._loaded.get(key)
        if kernel is None:
            kernel = self._loaded[key] = _load(combine_spec(args), self._device)
        return kernel


def dispatch_spec(args: _native.DispatchArgs) -> jit.KernelSpec:
    """What the dispatch kernel for these arguments is compiled for."""
    from moecomm import jit

    shape = args.ctx.shape
    return jit.KernelSpec(
        op="dispatch",
        ranks=shape.ranks,
        experts=shape.experts,
        topk=shape.topk,
        hidden=args.hidden,
        layout=args.layout,
        type=args.in_type,
        idx_bytes=args.idx_bytes,
        row_bytes=args.row_bytes,
        scale_bytes=args.scale_bytes,
        quantize=bool(args.quantize),
        repeat=bool(args.repeat),
    )


def combine_spec(args: _native.CombineArgs) -> jit.KernelSpec:
    """What the combine kernel for these arguments is compiled for."""
    from moecomm import jit

    shape = args.ctx.shape
    return jit.KernelSpec(
        op="combine",
        ranks=shape.ranks,
        experts=shape.experts,
        topk=shape.topk,
        hidden=args.hidden,
        layout=args.layout,
        type=args.type,
        wire=args.wire,
        weighted=bool(args.weighted),
    )


def _load(spec: jit.KernelSpec, device: torch.device) -> jit.Kernel:
    from moecomm import jit  # looked up when a kernel is wanted: it brings cuda.core

    return jit.load(spec, device)
