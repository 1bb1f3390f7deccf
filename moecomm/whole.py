"""Whole numbers that callers give."""

from __future__ import annotations


def is_whole(value: object) -> bool:
    """An int, or what stands for one as numpy's do; 1.0 is none."""
    return isinstance(value, int) or hasattr(value, "__index__")  # the former alone is in graphs of torch.compile
