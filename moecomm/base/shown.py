"""repr() of tuples of tensors.  Never reads a number of a tensor: that would wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch


def of_tensors(name: str, values: dict[str, Any]) -> str:
    """A tuple of tensors and plain values, with shape, dtype and device of the tensors."""
    return f"<{name} {', '.join(f'{key}={_value(value)}' for key, value in values.items() if value is not None)}>"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} {value.device}"
    return repr(value)
