"""The options that all ranks must pass alike in one call, packed into the 63 bits that travel in the round header.

Where two ranks differ, the error names the first field in which they do, with the values that the callers passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from moecomm.core.protocol import LAYOUTS, SCALE_FORMATS, TYPES

GROW = "asks for a larger buffer"
_NO_YES = (False, True)
_DTYPES = tuple(TYPES)
_FIELDS: tuple[tuple[str, int, Sequence[object]], ...] = (  # name, bits, meaning of each value; none: the number itself
    ("layout", 2, LAYOUTS),
    ("dtype", 3, _DTYPES),
    ("topk_idx dtype", 1, ("int32", "int64")),
    ("quantize", 1, (None, "fp8")),
    ("scale_format", 1, SCALE_FORMATS),
    ("scale_layout", 1, ("row", "column")),
    ("scale bytes", 20, ()),
    ("expert_alignment", 20, ()),
    ("handle given", 1, _NO_YES),
    ("split", 1, ("dispatch", "dispatch_begin")),
    ("wire", 3, _DTYPES),
    ("weight_grads given", 1, _NO_YES),
    ("weighted", 1, _NO_YES),
    ("fused", 1, _NO_YES),
    ("topk_weights given", 1, _NO_YES),
    (GROW, 1, _NO_YES),
    ("in chunks", 1, _NO_YES),
    ("gradients wanted", 1, _NO_YES),  # of moecomm.ops: a backward pass follows, in which every rank takes part
)


def pack(**fields: int) -> int:
    """Pack the fields of a call (names with underscores) into one integer."""
    word, at = 0, 0
    for name, bits, _ in _FIELDS:
        value = fields.get(name.replace(" ", "_"), 0)
        assert 0 <= value < 1 << bits, (name, value)
        word |= value << at
        at += bits
    return word


def shown(word: int) -> dict[str, str]:
    """Return the fields of a call in words: its layout and dtype, and the others that are not 0."""
    found = {}
    for name, bits, meaning in _FIELDS:
        value = word & ((1 << bits) - 1)
        word >>= bits
        if value or name in ("layout", "dtype"):
            found[name] = str(meaning[value] if value < len(meaning) else value).removeprefix("torch.")
    return found


def difference(mine: int, theirs: int) -> tuple[str, object, object]:
    """Return the first field in which two calls differ: name, mine, theirs."""
    for name, bits, meaning in _FIELDS:
        mask = (1 << bits) - 1
        if mine & mask != theirs & mask:
            values = [v & mask for v in (mine, theirs)]
            first, second = (meaning[v] if v < len(meaning) else v for v in values)
            return name, first, second
        mine, theirs = mine >> bits, theirs >> bits
    return "call", mine, theirs
