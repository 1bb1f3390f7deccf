"""Whole numbers that callers give."""

from __future__ import annotations

import operator

from moecomm.errors import BadInput


def is_whole(value: object) -> bool:
    """An int, or what stands for one as numpy's do; 1.0 is none, nor are arrays of several."""
    if isinstance(value, int):  # alone in graphs of torch.compile, where the rest can't be asked
        return True
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_whole(argument: str, value: object, least: int) -> None:
    """Raises BadInput unless it is a whole number, and no less."""
    if not (is_whole(value) and value >= least):  # type: ignore[operator]
        raise BadInput(argument, repr(value), f"a whole number, {least} or more")


def check_alignment(argument: str, value: object) -> None:
    """The same for rows of which groups begin at multiples."""
    if not (is_whole(value) and 1 <= value < 1 << 20):  # type: ignore[operator]
        raise BadInput(argument, repr(value), "a whole number, 1 to 2^20 - 1")
