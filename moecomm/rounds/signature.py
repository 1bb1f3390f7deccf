"""The options that all ranks must pass alike in one call, packed into the 63 bits that travel in the round header.

Dispatch and combine have a table of fields each.  Where two ranks differ, the error names the first field in which they
do, with the values that the callers passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from moecomm.base.choices import BALANCES, Quantize, ScaleLayout
from moecomm.base.protocol import LAYOUTS, SCALE_FORMATS, TYPES

GROW = "asks for a larger buffer"
LAYERS = (1 << 14) - 1  # numbers of layers, from 1
# The calls of users that rounds belong to.
DISPATCHES = (
    "dispatch",
    "dispatch_begin",
    "dispatch in chunks",
    "moe",
    "moe in chunks",
    "fused moe",
    "fused moe in chunks",
    "backward of combine",
    "backward of moe",
    "backward of moe in chunks",
    "verification",
    "moe in INT8",  # whose rows look like those in FP8
    "moe in INT8 in chunks",
)
COMBINES = ("combine", "moe", "backward of dispatch", "backward of moe")

_Field = tuple[str, int, Sequence[object]]  # name, bits, meaning of each value; none: the number itself
_NO_YES = (False, True)
_DTYPES = tuple(TYPES)
_LAYOUT: _Field = ("layout", 2, LAYOUTS)
_DTYPE: _Field = ("dtype", 3, _DTYPES)
_LAYER: _Field = ("layer", LAYERS.bit_length(), ())  # 0: has no number
_GRADIENTS: _Field = ("gradients wanted", 1, _NO_YES)  # of moecomm.ops: all ranks take part in a backward pass
_WEIGHTS: _Field = ("weight_grads given", 1, _NO_YES)  # of a dispatch: by its backward pass
QUANTIZED = (None, *get_args(Quantize))
_DISPATCH: tuple[_Field, ...] = (
    ("call", 4, DISPATCHES),
    _LAYOUT,
    _DTYPE,
    ("topk_idx dtype", 1, ("int32", "int64")),
    ("quantize", 4, QUANTIZED),
    ("scale_format", 2, SCALE_FORMATS),
    ("scale_layout", 2, get_args(ScaleLayout)),
    ("handle given", 1, _NO_YES),
    _GRADIENTS,
)
_GROW: _Field = (GROW, 1, _NO_YES)
_LONG = ("scale bytes", "expert_alignment")
# A dispatch has one of three forms.  Its lowest bits say which: 0, 1 and then 0, 1 and then 1.
_BALANCE: _Field = ("balance", 1, (None, *BALANCES))
_SHORT_FORM = (("", 1, ()), _LAYER, *_DISPATCH, *((name, 12, ()) for name in _LONG), _GROW, _WEIGHTS, _BALANCE)
_LONG_FORM = (("", 2, ()), *_DISPATCH, *((name, 20, ()) for name in _LONG), _GROW)
# Rows that travel as bytes.  Scales and extras beside them fill whole words.
_ROW_BYTES: _Field = ("row bytes", 16, range(0, 1 << 20, 16))
_BYTES_FORM: tuple[_Field, ...] = (
    ("", 2, ()),
    *(field for field in _DISPATCH if field[0] not in ("dtype", "scale_format")),
    _ROW_BYTES,
    ("scale bytes", 18, range(0, 1 << 20, 4)),
    ("expert_alignment", 10, ()),
    _GROW,
    _WEIGHTS,
)
MOST_BYTES_ALIGNMENT = (1 << 10) - 1  # of rows that travel as bytes
_WIRES = (*_DTYPES[:3], "fp8", "int8", "rows")
ROWS_WIRE = _WIRES.index("rows")  # of rows that travel unsummed, whatever their dtype
_COMBINE: tuple[_Field, ...] = (
    _LAYER,
    ("call", 2, COMBINES),
    _LAYOUT,
    _DTYPE,
    ("wire", 3, _WIRES),
    ("weighted", 1, _NO_YES),
    _WEIGHTS,
    ("topk_weights given", 1, _NO_YES),
    _GRADIENTS,
)


def pack(op: str = "dispatch", /, **fields: int) -> int:
    """Pack the fields of a call (names with underscores) into one integer.

    `op`: "combine", "dispatch", or "bytes": a dispatch whose rows travel as bytes.  A dispatch drops `layer`,
    `weight_grads given` and `balance` beside rows of scales, or an alignment, of 4096 and more; one of bytes drops the
    first and the last of these.
    """
    if op == "combine":
        table = _COMBINE
    elif op == "bytes":
        table, fields[""] = _BYTES_FORM, 3
        fields["row_bytes"] //= 16
        fields["scale_bytes"] //= 4
    else:
        is_long = max(fields.get(name.replace(" ", "_"), 0) for name in _LONG) >= 1 << 12
        table = _LONG_FORM if is_long else _SHORT_FORM
        fields[""] = int(is_long)
    word, at = 0, 0
    for name, bits, _ in table:
        value = fields.get(name.replace(" ", "_"), 0)
        assert 0 <= value < 1 << bits, (name, value)
        word |= value << at
        at += bits
    return word


def shown(word: int, op: str = "dispatch") -> dict[str, str]:
    """Return the fields of a call in words: its layout and dtype, and the others that are not 0.

    `op`: "combine", or any other for a dispatch.
    """
    found = {}
    for name, (value, meaning) in _fields(word, op).items():
        if value or name in ("layout", "dtype", "row bytes"):
            found[name] = str(_meant(value, meaning)).removeprefix("torch.")
    return found


def difference(mine: int, theirs: int, op: str = "dispatch") -> tuple[str, object, object]:
    """Return the first field in which two calls differ: name, mine, theirs."""
    ours, others = _fields(mine, op), _fields(theirs, op)
    for name, (value, meaning) in ours.items():
        if name in others and value != (their_value := others[name][0]):
            return name, _meant(value, meaning), _meant(their_value, meaning)
    if ("dtype" in ours) != ("dtype" in others):
        kinds = [_meant(*call["dtype"]) if "dtype" in call else "rows of another kind" for call in (ours, others)]
        return "x", kinds[0], kinds[1]
    return "call", mine, theirs


def _fields(word: int, op: str) -> dict[str, tuple[int, Sequence[object]]]:
    """Return the fields of a call by name: value, and the meaning of each value."""
    table = _COMBINE if op == "combine" else (_SHORT_FORM, _LONG_FORM, _SHORT_FORM, _BYTES_FORM)[word & 3]
    found = {}
    for name, bits, meaning in table:
        if name:
            found[name] = word & ((1 << bits) - 1), meaning
        word >>= bits
    return found


def _meant(value: int, meaning: Sequence[object]) -> object:
    return meaning[value] if value < len(meaning) else value
