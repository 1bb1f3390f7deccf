"""Checks of the tensors of a dispatch.  The first argument that can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import _native
from moecomm.base import formats
from moecomm.base.arrays import as_tensor, check_rows, check_tensor
from moecomm.base.protocol import QUANT_GROUP
from moecomm.base.validation import check_integer
from moecomm.dispatch.options import Options, check_options
from moecomm.dispatch.routed import Handle
from moecomm.errors import BadInput, Closed
from moecomm.rounds.rounds import Rounds

SCALE_TYPES = (torch.float32, torch.int32, torch.uint8, torch.int16, torch.float8_e8m0fnu)


@dataclass
class Tensors:
    """The tensors of a dispatch, checked, and a function that turns torch tensors into the caller's kind of arrays."""

    x: torch.Tensor
    # Scales of x. Where is_cast_to_bytes(): the global scale [1, 1] of the rows, on their device or on the host.
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None  # None: a handle has the routing
    topk_weights: torch.Tensor | None
    back: Callable[[torch.Tensor], Any] | None


def check(
    rounds: Rounds,
    options: Options,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    max_rows: int | None,
    handle: Handle | None,
) -> Tensors:
    """Raise BadInput that names the first argument that can't be used."""
    x, back = as_tensor("x", x)
    if scales is not None:
        scales = as_tensor("scales", scales)[0]
    check_options(options)
    check_max_rows(max_rows)
    _check_rows(rounds, x)
    if not is_cast_to_bytes(options, x):  # payloads.py has checked these
        if options.quantize is not None and x.dtype is not torch.uint8:
            _check_quantize(rounds, x, scales)
        _check_scales(rounds, options, x, scales)
    if handle is None:
        topk_idx, topk_weights = check_routing(rounds, x.shape[0], topk_idx, topk_weights)
    elif x.shape[0] != handle.num_tokens:
        raise BadInput("x", f"{x.shape[0]} tokens", f"the {handle.num_tokens} of the handle")
    return Tensors(x, scales, topk_idx, topk_weights, back)


def check_handle(rounds: Rounds, handle: Any) -> None:
    """Raise BadInput or Closed unless `handle` comes from a dispatch of this Buffer."""
    if not isinstance(handle, Handle):
        other = "one of moecomm.ops.dispatch" if hasattr(handle, "buffer") else type(handle).__name__
        raise BadInput("handle", other, "the .handle of what Buffer.dispatch returned")
    if handle.rounds is not rounds:
        if handle.rounds.closed:
            raise Closed("handle's Buffer")
        raise BadInput("handle", "one of another Buffer", "one of this Buffer")


def check_max_rows(max_rows: int | None) -> None:
    """Raise BadInput unless `max_rows` is None or a number of rows."""
    if max_rows is not None:
        check_integer("max_rows", max_rows, 0)


def is_cast_to_bytes(options: Options, x: torch.Tensor) -> bool:
    """Return whether the executor casts rows to another format than "fp8": they arrive as bytes."""
    return options.quantize is not None and options.quantize != "fp8" and x.dtype is not torch.uint8


def travel_as_bytes(options: Options, x: torch.Tensor) -> bool:
    """Return whether rows arrive as bytes, cast on the way or before."""
    return x.dtype is torch.uint8 or is_cast_to_bytes(options, x)


def scale_dtype(options: Options, like: Tensors) -> torch.dtype | None:
    """The dtype of the scales that arrive; None without scales."""
    if options.quantize is not None and is_cast_to_bytes(options, like.x):
        return None if formats.FORMATS[options.quantize].scales is None else torch.uint8
    if options.quantize is None or like.x.dtype is torch.uint8:
        return None if like.scales is None else like.scales.dtype
    if options.scale_format == "fp32":
        return torch.float32
    return torch.int32 if options.scale_layout == "column" else torch.float8_e8m0fnu


def scale_columns(options: Options, like: Tensors) -> int:
    """The number of scales of a row."""
    if options.quantize is not None and is_cast_to_bytes(options, like.x):
        return formats.FORMATS[options.quantize].scale_bytes(like.x.shape[1])
    if like.scales is not None:
        return like.scales.shape[1]
    columns = QUANT_GROUP * (4 if options.scale_format == "ue8m0" and options.scale_layout == "column" else 1)
    return -(-like.x.shape[1] // columns)


def _check_rows(rounds: Rounds, x: torch.Tensor) -> None:
    dtypes = (rounds.dtype, torch.float8_e4m3fn)
    if x.dtype is not torch.uint8:  # a payload as bytes: see payloads.py, which has checked it
        check_tensor("x", x, device=rounds.device, dtypes=dtypes, shape=(None, rounds.hidden))
    if x.shape[0] > rounds.max_tokens:
        raise BadInput("x", f"{x.shape[0]} tokens", f"at most max_tokens = {rounds.max_tokens}")
    if x.shape[1] * x.element_size() % 16:
        raise BadInput(
            "x", f"rows of {x.shape[1]} bytes", "a multiple of 16 bytes: hidden a multiple of 16 for float8 rows"
        )
    check_rows("x", x)


def _check_quantize(rounds: Rounds, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    if x.dtype is torch.float8_e4m3fn or scales is not None:
        raise BadInput("quantize", "rows that are float8 already, or scales", f"{rounds.dtype} rows alone")
    if rounds.hidden % 16:
        raise BadInput("quantize", f"hidden = {rounds.hidden}", "a multiple of 16: rows of a multiple of 16 bytes")


def _check_scales(rounds: Rounds, options: Options, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        if x.dtype is torch.float8_e4m3fn:
            raise BadInput("scales", "None", "the scales of float8 rows")
        if options.scale_layout != "row" and options.quantize is None:
            raise BadInput("scale_layout", repr(options.scale_layout), "scales: given, or those of quantize='fp8'")
        return
    check_tensor("scales", scales, device=rounds.device, dtypes=SCALE_TYPES, shape=(x.shape[0], None))
    if scales.shape[1] < 1 or scales.shape[1] * scales.element_size() >= 1 << 20:
        raise BadInput("scales", f"{scales.shape[1]} columns", "at least one, and rows of less than 2^20 bytes")
    if scales.numel() and scales.shape[1] > 1 and scales.stride(1) != 1:
        raise BadInput("scales", f"strides {scales.stride()}", "contiguous rows")
    if rounds.domain_ranks != rounds.num_ranks:
        shape, bytes_of_scales = rounds.session.context.shape, scales.shape[1] * scales.element_size()
        room = shape.receive_bytes - _native.received_token_bytes(shape, x.shape[1] * x.element_size(), 0)
        if bytes_of_scales > room:
            raise BadInput("scales", f"rows of {bytes_of_scales} bytes", f"at most {room} between domains")
    if options.scale_layout == "column" and scales.element_size() != 4 and x.dtype is not torch.uint8:
        raise BadInput("scales", str(scales.dtype), "elements of 4 bytes for scale_layout='column'")


def check_routing(
    rounds: Rounds, tokens: int, topk_idx: Any, topk_weights: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and weights as contiguous torch tensors.  Raises BadInput."""
    shape = (tokens, rounds.topk)
    if topk_idx is None:
        raise BadInput("topk_idx", "None", "expert ids, or handle= to repeat a dispatch")
    topk_idx = as_tensor("topk_idx", topk_idx)[0]
    check_tensor("topk_idx", topk_idx, device=rounds.device, dtypes=(torch.int64, torch.int32), shape=shape)
    if topk_weights is not None:
        topk_weights = as_tensor("topk_weights", topk_weights)[0]
        check_tensor("topk_weights", topk_weights, device=rounds.device, dtypes=(torch.float32,), shape=shape)
        topk_weights = topk_weights.contiguous()
    return topk_idx.contiguous(), topk_weights
