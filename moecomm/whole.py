"""Whole numbers that callers give."""

from __future__ import annotations

import operator


def is_whole(value: object) -> bool:
    """An int, or what stands for one as numpy's do; 1.0 is none, nor are arrays of several."""
    if isinstance(value, int):  # alone in graphs of torch.compile, where the rest can't be asked
        return True
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
