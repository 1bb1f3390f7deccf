"""The arguments of a combine, checked one by one: what can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native
from moecomm.core.arrays import as_output_tensor, as_tensor, check_no_overlap, check_rows, check_tensor
from moecomm.core.settings import DTYPES
from moecomm.core.validation import check_flag
from moecomm.dispatch.arguments import check_num_sms
from moecomm.errors import BadInput, Unsupported
from moecomm.routed import Handle

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

_MOST_WEIGHTS = 4096  # kMostWeights: the rule is that of takes_weights in csrc/protocol/layout.h


@dataclass
class Tensors:
    """The tensors of a combine, as torch tensors that can be used, and what turns ours into the caller's arrays."""

    y: torch.Tensor
    out: torch.Tensor | None
    bias: torch.Tensor | None
    weight_grads: torch.Tensor | None
    topk_weights: torch.Tensor | None
    back: Callable[[torch.Tensor], Any] | None


def check(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    out: Any,
    bias: Any,
    weighted: bool,
    weight_grads: Any,
    wire: torch.dtype | None,
    num_sms: int | None,
    topk_weights: Any,
) -> Tensors:
    """Raises BadInput for what can't be used, Unsupported for weights that combine can't take."""
    y, back = as_tensor("y", y)
    check_num_sms(num_sms)
    _check_y(buffer, y, handle)
    check_flag("weighted", weighted)
    if wire is not None and wire is not torch.float32 and wire is not y.dtype:
        raise BadInput("wire", wire, f"None or the dtype of y, {y.dtype}")
    shape = (handle.num_tokens, buffer.hidden)
    if out is not None:
        out = as_output_tensor("out", out, device=buffer.device, dtypes=(y.dtype,), shape=shape)
    if bias is not None:
        bias = as_tensor("bias", bias)[0]
        one_row = bias.ndim == 1
        check_tensor(
            "bias", bias, device=buffer.device, dtypes=(y.dtype, torch.float32), shape=shape[1:] if one_row else shape
        )
        check_rows("bias", bias.unsqueeze(0) if one_row else bias)
    if weight_grads is not None:
        weight_grads = as_tensor("weight_grads", weight_grads)[0]
        rows = handle.y_shape[:-1]
        grads_shape = (*rows, buffer.topk) if handle.layout == "flat" else rows
        check_tensor("weight_grads", weight_grads, device=buffer.device, dtypes=(torch.float32,), shape=grads_shape)
        weight_grads = weight_grads.contiguous()
    if topk_weights is not None:
        _check_supported(buffer, handle, weighted, weight_grads)
        topk_weights = as_tensor("topk_weights", topk_weights)[0]
        entries = (handle.num_tokens, buffer.topk)
        check_tensor("topk_weights", topk_weights, device=buffer.device, dtypes=(torch.float32,), shape=entries)
        topk_weights = topk_weights.contiguous()
    if out is not None:
        check_no_overlap("out", out, y=y, bias=bias, weight_grads=weight_grads, topk_weights=topk_weights)
        if _native.shares_tables(handle.args, out):
            raise BadInput("out", "memory of the handle, which is read meanwhile", "memory of its own")
    return Tensors(y, out, bias, weight_grads, topk_weights, back)


def takes_weights(buffer: Buffer) -> bool:
    """Whether combine(topk_weights=) can be had of a Buffer: the same on all its ranks."""
    return buffer.max_tokens * buffer.topk <= _MOST_WEIGHTS


def _check_supported(buffer: Buffer, handle: Handle, weighted: bool, weight_grads: Any) -> None:
    """All of it is the same on all ranks, so that none is left waiting."""
    if not weighted:
        raise BadInput("topk_weights", "given with weighted=False", "None")
    what = None
    if handle.layout == "flat":
        what = "flat rows, which have no weights"
    elif weight_grads is not None:
        what = "weight_grads"
    elif not takes_weights(buffer):
        what = f"max_tokens * topk = {buffer.max_tokens * buffer.topk}, more than {_MOST_WEIGHTS}"
    if what is not None:
        raise Unsupported(f"combine(topk_weights=) with {what}")


def _check_y(buffer: Buffer, y: torch.Tensor, handle: Handle) -> None:
    check_tensor("y", y, device=buffer.device, dtypes=DTYPES, shape=handle.y_shape)
    if buffer.hidden * y.element_size() % 16:
        raise BadInput("y", f"rows of {buffer.hidden * y.element_size()} bytes", "a multiple of 16 bytes")
    if handle.layout == "batched":
        if not y.is_contiguous():
            raise BadInput("y", f"strides {y.stride()}", "a contiguous [E/R, rows, H]")
        y = y.flatten(0, 1)
    check_rows("y", y)
