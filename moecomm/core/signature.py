"""The options that all ranks must pass alike in one call, packed into the 63 bits that travel in the round header.

Where two ranks differ, the error names the first field in which they do.
"""

from __future__ import annotations

GROW = "asks for a larger buffer"
_FIELDS = (  # name, bits
    ("layout", 2),
    ("dtype", 3),
    ("topk_idx dtype", 1),
    ("quantize", 1),
    ("scale_format", 1),
    ("scale_layout", 1),
    ("bytes of a row of scales", 20),
    ("expert_alignment", 20),
    ("handle given", 1),
    ("in two halves", 1),
    ("wire", 3),
    ("weight_grads given", 1),
    ("weighted", 1),
    ("rows that are fetched", 1),
    ("topk_weights given", 1),
    (GROW, 1),
)


def pack(**fields: int) -> int:
    """Pack the fields of a call (names with underscores) into one integer."""
    word, at = 0, 0
    for name, bits in _FIELDS:
        value = fields.get(name.replace(" ", "_"), 0)
        assert 0 <= value < 1 << bits, (name, value)
        word |= value << at
        at += bits
    return word


def difference(mine: int, theirs: int) -> tuple[str, int, int]:
    """Return the first field in which two calls differ: name, mine, theirs."""
    for name, bits in _FIELDS:
        mask = (1 << bits) - 1
        if mine & mask != theirs & mask:
            return name, mine & mask, theirs & mask
        mine, theirs = mine >> bits, theirs >> bits
    return "call", mine, theirs
