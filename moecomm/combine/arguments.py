"""The arguments of a combine, checked one by one: what can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moecomm.arrays import adopt, check_rows, check_tensor
from moecomm.dispatch.arguments import check_num_sms
from moecomm.errors import BadInput
from moecomm.routed import Handle
from moecomm.settings import DTYPES

if TYPE_CHECKING:
    from moecomm.buffer import Buffer


@dataclass
class Tensors:
    """The tensors of a combine, as torch tensors that can be used, and what turns ours into the caller's arrays."""

    y: torch.Tensor
    out: torch.Tensor | None
    bias: torch.Tensor | None
    weight_grads: torch.Tensor | None
    back: Callable[[torch.Tensor], Any] | None


def check(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    out: Any,
    bias: Any,
    weight_grads: Any,
    wire: torch.dtype | None,
    num_sms: int | None,
) -> Tensors:
    """Raises BadInput for what can't be used."""
    y, back = adopt("y", y)
    check_num_sms(num_sms)
    _check_y(buffer, y, handle)
    if wire not in (None, torch.float32, y.dtype):
        raise BadInput("wire", wire, f"None or the dtype of y, {y.dtype}")
    shape = (handle.num_tokens, buffer.hidden)
    if out is not None:
        out = adopt("out", out)[0]
        check_tensor("out", out, device=buffer.device, dtypes=(y.dtype,), shape=shape)
        check_rows("out", out)
    if bias is not None:
        bias = adopt("bias", bias)[0]
        one_row = bias.ndim == 1
        check_tensor("bias", bias, device=buffer.device, dtypes=(y.dtype,), shape=shape[1:] if one_row else shape)
        check_rows("bias", bias.unsqueeze(0) if one_row else bias)
    if weight_grads is not None:
        weight_grads = adopt("weight_grads", weight_grads)[0]
        rows = handle.y_shape[:-1]
        grads_shape = (*rows, buffer.topk) if handle.layout == "flat" else rows
        check_tensor("weight_grads", weight_grads, device=buffer.device, dtypes=(torch.float32,), shape=grads_shape)
        weight_grads = weight_grads.contiguous()
    return Tensors(y, out, bias, weight_grads, back)


def _check_y(buffer: Buffer, y: torch.Tensor, handle: Handle) -> None:
    check_tensor("y", y, device=buffer.device, dtypes=DTYPES, shape=handle.y_shape)
    if buffer.hidden * y.element_size() % 16:
        raise BadInput("y", f"rows of {buffer.hidden * y.element_size()} bytes", "a multiple of 16 bytes")
    if handle.layout == "batched":
        if not y.is_contiguous():
            raise BadInput("y", f"strides {y.stride()}", "a contiguous [E/R, rows, H]")
        y = y.flatten(0, 1)
    check_rows("y", y)
