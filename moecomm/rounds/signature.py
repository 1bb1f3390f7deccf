"""The options that all ranks must pass alike in one call, packed into the 63 bits that travel in the round header.

Dispatch and combine have a table of fields each.  Where two ranks differ, the error names the first field in which they
do, with the values that the callers passed.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_DISPATCH: tuple[_Field, ...] = (
    ("call", 4, DISPATCHES),
    _LAYOUT,
    _DTYPE,
    ("topk_idx dtype", 1, ("int32", "int64")),
    ("quantize", 4, (None, "fp8")),
    ("scale_format", 3, SCALE_FORMATS),
    ("scale_layout", 2, ("row", "column")),
    ("handle given", 1, _NO_YES),
    _GRADIENTS,
)
_GROW: _Field = (GROW, 1, _NO_YES)
_LONG = ("scale bytes", "expert_alignment")
_FORM: _Field = ("", 1, ())  # which of the two forms of a dispatch follows
_SHORT_FORM = (_FORM, _LAYER, *_DISPATCH, *((name, 12, ()) for name in _LONG), _GROW, _WEIGHTS)
_LONG_FORM = (_FORM, *_DISPATCH, *((name, 20, ()) for name in _LONG), _GROW)
_COMBINE: tuple[_Field, ...] = (
    _LAYER,
    ("call", 2, COMBINES),
    _LAYOUT,
    _DTYPE,
    ("wire", 3, _DTYPES),
    ("weighted", 1, _NO_YES),
    _WEIGHTS,
    ("topk_weights given", 1, _NO_YES),
    _GRADIENTS,
)


def pack(op: str = "dispatch", /, **fields: int) -> int:
    """Pack the fields of a call (names with underscores) into one integer.

    A dispatch drops `layer` and `weight_grads given` beside rows of scales, or an alignment, of 4096 and more.
    """
    if op == "combine":
        table = _COMBINE
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
        if value or name in ("layout", "dtype"):
            found[name] = str(_meant(value, meaning)).removeprefix("torch.")
    return found


def difference(mine: int, theirs: int, op: str = "dispatch") -> tuple[str, object, object]:
    """Return the first field in which two calls differ: name, mine, theirs."""
    ours, others = _fields(mine, op), _fields(theirs, op)
    for name, (value, meaning) in ours.items():
        if name in others and value != (their_value := others[name][0]):
            return name, _meant(value, meaning), _meant(their_value, meaning)
    return "call", mine, theirs


def _fields(word: int, op: str) -> dict[str, tuple[int, Sequence[object]]]:
    """Return the fields of a call by name: value, and the meaning of each value."""
    table = _COMBINE if op == "combine" else _LONG_FORM if word & 1 else _SHORT_FORM
    found = {}
    for name, bits, meaning in table:
        if name:
            found[name] = word & ((1 << bits) - 1), meaning
        word >>= bits
    return found


def _meant(value: int, meaning: Sequence[object]) -> object:
    return meaning[value] if value < len(meaning) else value
