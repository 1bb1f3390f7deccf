"""Argument structs of kernels as ctypes structs, made from the tables of the native module."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from moecomm import _native

_TABLE = _native.structs()
_SCALARS = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """Return the class of a struct of csrc.  Equal names give the same class; it refuses unknown fields."""
    return type(name, (ctypes.Structure,), {"_fields_": fields_of(name), "__slots__": ()})


def fields_of(name: str) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a struct: scalars, other structs, a Context, and padding where C++ has it."""
    size, rows = _TABLE[name]
    fields: list[tuple[str, Any]] = []
    end = 0
    for field, kind, offset, nbytes, count in [*rows, ("end", "", size, 0, 0)]:
        if offset > end:
            fields.append((f"padding_{field}", ctypes.c_uint8 * (offset - end)))
        if kind == "Context":
            fields.append((field, ctypes.c_uint64 * (nbytes // 8)))
        elif kind:
            one: Any = _SCALARS.get(kind) or struct(kind)
            fields.append((field, one * count if count else one))
        end = offset + nbytes
    return fields
