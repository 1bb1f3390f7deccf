"""combine: check what the caller passed, say it in one struct; the backend's executor does the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native, call
from moecomm.arrays import adopt, check_rows, check_tensor, window_tensor
from moecomm.dispatch import LAYOUTS, check_handle, check_workers
from moecomm.errors import BadInput
from moecomm.routed import Handle
from moecomm.settings import DTYPES

if TYPE_CHECKING:
    from moecomm.buffer import Buffer


@dataclass
class Pending:
    """A combine that has been prepared: what the executor gets, and what will be handed out."""

    args: _native.CombineArgs
    out: Any
    out_weight_grads: torch.Tensor | None
    back: Callable[[torch.Tensor], Any]
    inputs: tuple[Any, ...]  # alive until the executor has them


def prepare(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    *,
    out: Any = None,
    bias: Any = None,
    weighted: bool = True,
    weight_grads: Any = None,
    wire: torch.dtype | None = None,
    num_sms: int | None = None,
) -> Pending:
    """Checks the arguments; see Buffer.combine."""
    buffer.require_usable()
    session = buffer.session
    check_handle(buffer, handle)
    y, back = adopt("y", y)
    check_tensor("y", y, device=buffer.device, dtypes=DTYPES, shape=handle.y_shape)
    rows = y.flatten(0, 1) if handle.layout == "batched" and y.is_contiguous() else y
    if rows.ndim != 2:
        raise BadInput("y", f"strides {y.stride()}", "a contiguous [E/R, R * max_tokens, H]")
    if buffer.hidden * y.element_size() % 16:
        raise BadInput("y", f"rows of {buffer.hidden * y.element_size()} bytes", "a multiple of 16 bytes")

    args = _native.CombineArgs()
    args.ctx, args.route = session.context, handle.route
    args.y, args.y_stride = rows.data_ptr(), check_rows("y", rows)
    args.num_tokens, args.hidden, args.type = handle.num_tokens, buffer.hidden, DTYPES.index(y.dtype)
    args.layout, args.weighted = LAYOUTS.index(handle.layout), int(weighted)
    args.wire = _wire(wire, y.dtype)
    shape = (handle.num_tokens, buffer.hidden)
    if out is None:
        result = torch.empty(shape, dtype=y.dtype, device=buffer.device)
        out = back(result)
    else:
        result = adopt("out", out)[0]
        check_tensor("out", result, device=buffer.device, dtypes=(y.dtype,), shape=shape)
    args.out, args.out_stride = result.data_ptr(), check_rows("out", result)
    bias = _take_bias(buffer, args, bias, y.dtype, shape)
    grads, home = _take_weight_grads(buffer, args, weight_grads, handle)
    args.workers = session.workers(check_workers(num_sms), handle.num_tokens)
    args.call = call.pack(
        layout=args.layout,
        dtype=args.type,
        wire=args.wire,
        weighted=args.weighted,
        weight_grads_given=int(grads is not None),
    )
    return Pending(args, out, home, back, (rows, bias, grads))


def empty(buffer: Buffer, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
    """See Buffer.empty."""
    buffer.require_usable()
    check_handle(buffer, handle)
    if dtype not in DTYPES:
        raise BadInput("dtype", dtype, " or ".join(map(str, DTYPES)))
    block = buffer.memory.allocate(max(1, math.prod(handle.y_shape) * dtype.itemsize))
    address = buffer.session.context.peers[buffer.rank] + block.offset
    return window_tensor(block, address, handle.y_shape, dtype, buffer.device, buffer.session.owner)


def finish(buffer: Buffer, pending: Pending) -> Any:
    """Hands the result out; on CPUs after a look at how the round went."""
    if buffer.device.type == "cpu":
        buffer.raise_failure()
    if pending.out_weight_grads is None:
        return pending.out
    return pending.out, pending.back(pending.out_weight_grads)


def _wire(wire: torch.dtype | None, dtype: torch.dtype) -> int:
    if wire is None or wire is torch.float32:
        return DTYPES.index(torch.float32)
    if wire is not dtype:
        raise BadInput("wire", wire, f"None or the dtype of y, {dtype}")
    return DTYPES.index(wire)


def _take_bias(
    buffer: Buffer, args: _native.CombineArgs, bias: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> torch.Tensor | None:
    if bias is None:
        return None
    added = adopt("bias", bias)[0]
    one_row = added.ndim == 1
    check_tensor("bias", added, device=buffer.device, dtypes=(dtype,), shape=shape[1:] if one_row else shape)
    rows = added.unsqueeze(0) if one_row else added
    stride = check_rows("bias", rows)
    args.bias, args.bias_stride = added.data_ptr(), 0 if one_row else stride
    return added


def _take_weight_grads(
    buffer: Buffer, args: _native.CombineArgs, grads: Any, handle: Handle
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if grads is None:
        return None, None
    grads = adopt("weight_grads", grads)[0]
    shape = (handle.y_shape[0], buffer.topk) if handle.layout == "flat" else handle.y_shape[:-1]
    check_tensor("weight_grads", grads, device=buffer.device, dtypes=(torch.float32,), shape=shape)
    grads = grads.contiguous()
    home = torch.empty((handle.num_tokens, buffer.topk), dtype=torch.float32, device=buffer.device)
    # an empty tensor has no address, but the executor must still know that gradients travel
    args.weight_grads, args.out_weight_grads = grads.data_ptr() or 16, home.data_ptr()
    return grads, home
