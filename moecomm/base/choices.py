"""The words that arguments of the public API take, as types.  A type checker refuses any other word."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

Layout: TypeAlias = Literal["flat", "expert", "batched"]  # by Layout in csrc/protocol/args.h
ByExpert: TypeAlias = Literal["expert", "batched"]  # layouts with one row for each token and expert
BackendName: TypeAlias = Literal["auto", "lsa", "gin", "nvshmem", "host"]  # in the order that "auto" prefers
Quantize: TypeAlias = Literal[  # by FORMATS in moecomm/base/formats.py
    "fp8", "fp8_token", "fp8_tensor", "int8_token", "int8_group", "mxfp8", "nvfp4", "mxfp4"
]
ScaleFormat: TypeAlias = Literal["fp32", "ue8m0"]  # by ScaleFormat in csrc/protocol/args.h
ScaleLayout: TypeAlias = Literal["row", "column", "swizzled"]
ReplicaChoice: TypeAlias = Literal[
    "token", "nearest", "balanced"
]  # of an expert, for each entry: moecomm/base/placement.py
Balance: TypeAlias = Literal["replicate"]  # of the ranks of an expert layer
BALANCES: tuple[Balance, ...] = ("replicate",)
OnTimeout: TypeAlias = Literal["raise", "mask"]
ON_TIMEOUT: tuple[OnTimeout, ...] = ("raise", "mask")
WireName: TypeAlias = Literal["exact", "fp8", "int8"]
Wire: TypeAlias = WireName | torch.dtype  # a dtype: that of y, or that which a word stands for
CombineWireName: TypeAlias = WireName | Literal["rows"]
CombineWire: TypeAlias = CombineWireName | torch.dtype  # of one call: "rows": no rank adds up its rows of a token
Overflow: TypeAlias = Literal["chunks", "drop", "error"]  # what becomes of rows that have no room
Activation: TypeAlias = Literal["swiglu", "geglu", "geglu_tanh", "swigluoai", "swiglustep"]
GateKind: TypeAlias = Literal["softmax", "sigmoid"]


WIRES = {"exact": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}  # the dtypes of the words
CAST_WIRES = {torch.float8_e4m3fn: "fp8", torch.int8: "int8_group"}  # the formats of sums that travel with scales


def dtype_of_wire(wire: Any) -> Any:
    """Return the dtype that a caller's word for `wire` stands for; anything else as it is."""
    return WIRES.get(wire, wire) if isinstance(wire, str) else wire


def is_unsummed(wire: Any) -> bool:
    """Return whether a caller's `wire` is "rows": rows travel as they are, and source ranks alone add them."""
    return isinstance(wire, str) and wire == "rows"
