"""The words that arguments of the public API take, as types.  A type checker refuses any other word."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

Layout: TypeAlias = Literal["flat", "expert", "batched"]  # by Layout in csrc/protocol/args.h
ByExpert: TypeAlias = Literal["expert", "batched"]  # layouts with one row for each token and expert
BackendName: TypeAlias = Literal["auto", "lsa", "gin", "nvshmem", "host"]
Quantize: TypeAlias = Literal["fp8"]
ScaleFormat: TypeAlias = Literal["fp32", "ue8m0"]  # by ScaleFormat in csrc/protocol/args.h
ScaleLayout: TypeAlias = Literal["row", "column"]
OnTimeout: TypeAlias = Literal["raise", "mask"]
ON_TIMEOUT: tuple[OnTimeout, ...] = ("raise", "mask")
Wire: TypeAlias = Literal["exact"] | torch.dtype  # a dtype: that of y, or float32 for "exact"
Overflow: TypeAlias = Literal["chunks", "drop", "error"]  # what becomes of rows that have no room
Activation: TypeAlias = Literal["swiglu", "geglu", "geglu_tanh", "swigluoai"]  # by Activation in csrc/gemm/config.cuh
GateKind: TypeAlias = Literal["softmax", "sigmoid"]
PluginWay: TypeAlias = Literal["auto", "loopback", "tcp"]


def is_exact(wire: Any) -> bool:
    """Return whether a caller's `wire` is the word "exact".  Arrays, which compare by element, are not."""
    return isinstance(wire, str) and wire == "exact"
