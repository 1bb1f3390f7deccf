"""Refusal of forward-mode AD and torch.func: operators have gradients of backward() alone.

Without it, torch would silently take the tangents of their outputs for zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from moecomm.errors import Unsupported


def refuse(operator: str, *tensors: Any) -> None:
    """Raise Unsupported for a tensor with a tangent of forward-mode AD, or one of torch.func.grad, jvp and the like.

    All ranks raise alike, as their models are alike, before any of them sends.
    """
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            raise _unsupported(operator)
        return
    exist = forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not (exist or _functorch.is_functorch_wrapped_tensor(tensor)):
            continue
        if _is_differentiated(tensor):
            raise _unsupported(operator)


def may_exist() -> bool:
    """Return whether forward-mode AD or a transformation of torch.func is under way in this thread."""
    return forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether torch.func.vmap maps over the tensor, at any level of its transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _unsupported(operator: str) -> Unsupported:
    return Unsupported(f"{operator} in forward-mode AD or under torch.func: there are gradients of backward() alone")


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has a tangent, or a transformation of torch.func wants its gradient, at any level.

    Under a transformation, all tensors made are wrapped.
    """
    while True:
        wrapped = _functorch.is_functorch_wrapped_tensor(tensor)
        if wrapped and _functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        if _has_tangent(tensor):
            return True
        if not wrapped:
            return False
        tensor = _functorch.get_unwrapped(tensor)


def _has_tangent(tensor: torch.Tensor) -> bool:
    if forward_ad._current_level < 0 or _functorch.is_batchedtensor(tensor):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
