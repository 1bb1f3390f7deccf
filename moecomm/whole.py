"""Whole numbers that callers give."""

from __future__ import annotations


def is_whole(value: object) -> bool:
    """An int, or what stands for one as numpy's do; 1.0 is none."""
    return hasattr(value, "__index__")
