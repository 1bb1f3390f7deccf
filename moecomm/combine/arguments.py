"""Checks of the tensors of a combine.  The first argument that can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import _native
from moecomm.base import formats
from moecomm.base.arrays import (
    as_output_tensor,
    as_tensor,
    check_no_overlap,
    check_rows,
    check_tensor,
    refuse_gradients,
)
from moecomm.base.choices import CAST_WIRES, WIRES
from moecomm.base.protocol import DTYPES, MOST_WEIGHTS
from moecomm.combine import in_window
from moecomm.combine.options import Options, check_options, wire_dtype
from moecomm.dispatch.routed import ChunkedHandle, Handle
from moecomm.errors import BadInput, Unsupported
from moecomm.rounds.rounds import Rounds

_AT_ONCE = 4096  # rows that are in float32 while they are dequantized


@dataclass
class Tensors:
    """The tensors of a combine, checked, and a function that turns torch tensors into the caller's kind of arrays."""

    y: torch.Tensor
    out: torch.Tensor | None
    bias: torch.Tensor | None
    weight_grads: torch.Tensor | None
    topk_weights: torch.Tensor | None
    back: Callable[[torch.Tensor], Any] | None


def check(
    rounds: Rounds,
    options: Options,
    handle: Handle,
    y: Any,
    out: Any,
    bias: Any,
    weight_grads: Any,
    topk_weights: Any,
) -> Tensors:
    """Raise BadInput that names the first argument that can't be used, Unsupported for weights combine can't take."""
    y, back = as_tensor("y", y)
    _check_y(rounds, y, handle)
    check_options(options, y.dtype)
    _check_cast(rounds, options, y.dtype)
    shape = (handle.num_tokens, rounds.hidden)
    if out is not None:
        out = as_output_tensor("out", out, device=rounds.device, dtypes=(y.dtype,), shape=shape)
    if bias is not None:
        bias = as_tensor("bias", bias)[0]
        one_row = bias.ndim == 1
        check_tensor(
            "bias", bias, device=rounds.device, dtypes=(y.dtype, torch.float32), shape=shape[1:] if one_row else shape
        )
        check_rows("bias", bias.unsqueeze(0) if one_row else bias)
    if weight_grads is not None:
        weight_grads = as_tensor("weight_grads", weight_grads)[0]
        rows = handle.y_shape[:-1]
        grads_shape = (*rows, rounds.topk) if handle.layout == "flat" else rows
        check_tensor("weight_grads", weight_grads, device=rounds.device, dtypes=(torch.float32,), shape=grads_shape)
        weight_grads = weight_grads.contiguous()
    if options.unsummed:
        _check_unsummed(rounds, handle, weight_grads)
    if topk_weights is not None:
        _check_supported(rounds, handle, options, weight_grads)
        topk_weights = as_tensor("topk_weights", topk_weights)[0]
        entries = (handle.num_tokens, rounds.topk)
        check_tensor("topk_weights", topk_weights, device=rounds.device, dtypes=(torch.float32,), shape=entries)
        topk_weights = topk_weights.contiguous()
    if out is not None:
        check_no_overlap("out", out, y=y, bias=bias, weight_grads=weight_grads, topk_weights=topk_weights)
        if _native.shares_tables(handle.args, out):
            raise BadInput("out", "memory of the handle, which is read meanwhile", "memory of its own")
    return Tensors(y, out, bias, weight_grads, topk_weights, back)


def dequantized(
    rounds: Rounds, options: Options, handle: Handle | ChunkedHandle, y: tuple[Any, ...], weight_grads: Any
) -> torch.Tensor:
    """Return rows that are given in FP8, with scales, in the Buffer's dtype: in the window if peers read them there.

    Raises BadInput that names y.
    """
    if len(y) != 2:
        raise BadInput("y", f"a tuple of {len(y)}", "rows, or a pair of e4m3 values and their scales")
    refuse_gradients(y=y)
    data, scales = (as_tensor("y", tensor)[0] for tensor in y)
    shape = handle.y_shape
    check_tensor("y", data, device=rounds.device, dtypes=(torch.float8_e4m3fn,), shape=shape)
    check_tensor("y", scales, device=rounds.device, dtypes=(torch.float32,), shape=(*shape[:-1], None))
    groups = formats.FORMATS["fp8"].scale_columns(shape[-1])
    if scales.shape[-1] not in (1, groups):
        raise BadInput("y", f"{scales.shape[-1]} scales of a row", f"1 or {groups}")
    name = "fp8" if scales.shape[-1] == groups else "fp8_token"
    check_options(options, rounds.dtype)
    rows: torch.Tensor | None = None
    least = in_window.least_bytes(rounds, handle.layout, options)
    if weight_grads is None and data.numel() * rounds.dtype.itemsize >= least:
        rows = in_window.for_call(rounds, handle)
    if rows is None:
        rows = torch.empty(shape, dtype=rounds.dtype, device=rounds.device)
    to, values, each = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (rows, data, scales))
    for first in range(0, len(to), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        to[part] = formats.dequantize(values[part], each[part], name, dtype=rounds.dtype)
    return rows


def _check_cast(rounds: Rounds, options: Options, dtype: torch.dtype) -> None:
    """Raise BadInput if rows are to travel in one byte a column and can't."""
    wire = wire_dtype(options.wire or rounds.settings.wire, dtype)
    if wire in CAST_WIRES and rounds.hidden % 16:
        word = next(word for word, its in WIRES.items() if its is wire)
        raise BadInput(
            "wire", f"{word!r} with hidden = {rounds.hidden}", "a multiple of 16: rows of a multiple of 16 bytes"
        )


def takes_weights(rounds: Rounds) -> bool:
    """Return whether a Buffer takes combine(topk_weights=).  The same on all its ranks."""
    return _native.takes_weights(rounds.session.context.shape)


def _check_supported(rounds: Rounds, handle: Handle, options: Options, weight_grads: Any) -> None:
    """Raise alike on all ranks, so that none waits for another."""
    if not options.weighted:
        raise BadInput("topk_weights", "given with weighted=False", "None")
    what = None
    if handle.layout == "flat":
        what = "flat rows, which have no weights"
    elif weight_grads is not None:
        what = "weight_grads"
    elif not takes_weights(rounds) and not options.unsummed:
        what = f"max_tokens * topk = {rounds.max_tokens * rounds.topk}, more than {MOST_WEIGHTS}"
    if what is not None:
        raise Unsupported(f"combine(topk_weights=) does not support {what}")


def _check_unsummed(rounds: Rounds, handle: Handle | ChunkedHandle, weight_grads: Any) -> None:
    """Raise alike on all ranks, so that none waits for another."""
    what = None
    if handle.layout == "flat":
        what = "flat rows, each of which is a sum that its rank's experts made"
    elif weight_grads is not None:
        what = "weight_grads"
    elif rounds.domain_ranks != rounds.num_ranks:
        what = "several domains, between which sums travel"
    if what is not None:
        raise Unsupported(f"combine(wire='rows') does not support {what}")


def _check_y(rounds: Rounds, y: torch.Tensor, handle: Handle) -> None:
    check_tensor("y", y, device=rounds.device, dtypes=DTYPES, shape=handle.y_shape)
    if rounds.hidden * y.element_size() % 16:
        raise BadInput("y", f"rows of {rounds.hidden * y.element_size()} bytes", "a multiple of 16 bytes")
    if handle.layout == "batched":
        if not y.is_contiguous():
            raise BadInput("y", f"strides {y.stride()}", "a contiguous [E/R, rows, H]")
        y = y.flatten(0, 1)
    check_rows("y", y)
