"""Checks of integers that callers pass."""

from __future__ import annotations

import operator

from moecomm.errors import BadInput

_MOST = (1 << 63) - 1


def is_integer(value: object) -> bool:
    """Return whether it is an int or one of numpy's.  True, 1.0, arrays and tensors are not."""
    if isinstance(value, int):  # alone in graphs of torch.compile, where the rest can't be asked
        return not isinstance(value, bool)
    if hasattr(value, "__dlpack__"):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_integer(argument: str, value: object, least: int, most: int | None = None) -> None:
    """Raise BadInput unless it is an integer of at most 63 bits, and in the range."""
    if not (is_integer(value) and least <= value <= (_MOST if most is None else most)):  # type: ignore[operator]
        raise BadInput(argument, repr(value), f"a whole number, {least} {'or more' if most is None else f'to {most}'}")


def check_alignment(argument: str, value: object) -> None:
    """Raise BadInput unless it is an integer that groups of rows can be aligned to."""
    if not (is_integer(value) and 1 <= value < 1 << 20):  # type: ignore[operator]
        raise BadInput(argument, repr(value), "a whole number, 1 to 2^20 - 1")
