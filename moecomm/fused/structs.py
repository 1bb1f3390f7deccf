"""Argument structs of csrc/gemm and csrc/fused as ctypes structs, built from the native module's description."""

from __future__ import annotations

import ctypes
from typing import Any

from moecomm import _native

_TABLE = _native.fused_structs()
_SCALARS = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32}


def _fields(name: str, **structs: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a struct: scalars, members of `structs`, a Context, and padding where C++ has it."""
    size, rows = _TABLE[name]
    fields: list[tuple[str, Any]] = []
    end = 0
    for field, kind, offset, nbytes, count in [*rows, ("end", "", size, 0, 0)]:
        if offset > end:
            fields.append((f"padding_{field}", ctypes.c_uint8 * (offset - end)))
        if kind == "Context":
            fields.append((field, ctypes.c_uint64 * (nbytes // 8)))
        elif kind:
            one: Any = _SCALARS.get(kind) or structs[kind]
            fields.append((field, one * count if count else one))
        end = offset + nbytes
    return fields


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = _fields("TensorMap")


class Grouping(ctypes.Structure):
    """Grouping of csrc/gemm/tiles.h."""

    _fields_ = _fields("Grouping")


class GemmArgs(ctypes.Structure):
    """GemmArgs of csrc/gemm/args.h."""

    _fields_ = _fields("GemmArgs", TensorMap=TensorMap, Grouping=Grouping)


class LayerArgs(ctypes.Structure):
    """LayerArgs of csrc/fused/layer_args.h."""

    _fields_ = _fields("LayerArgs")


class ExpertLayerArgs(ctypes.Structure):
    """ExpertLayerArgs of csrc/fused/layer_args.h."""

    _fields_ = _fields("ExpertLayerArgs", GemmArgs=GemmArgs, LayerArgs=LayerArgs)
