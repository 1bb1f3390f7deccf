"""The arguments of a dispatch, checked one by one: what can't be used is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from moecomm import _native
from moecomm.core.arrays import as_tensor, check_rows, check_tensor
from moecomm.core.choices import Layout, ScaleFormat, ScaleLayout
from moecomm.core.integers import check_alignment, check_integer, is_integer
from moecomm.core.validation import check_flag, check_name
from moecomm.errors import BadInput, Closed
from moecomm.routed import Handle

if TYPE_CHECKING:
    from moecomm.buffer import Buffer
    from moecomm.dispatch.plan import Options

LAYOUTS = get_args(Layout)
SCALE_FORMATS = get_args(ScaleFormat)
SCALE_LAYOUTS = get_args(ScaleLayout)
SCALE_TYPES = (torch.float32, torch.int32, torch.uint8, torch.int16, torch.float8_e8m0fnu)
QUANT_GROUP = 128


@dataclass
class Tensors:
    """The tensors of a dispatch, as torch tensors that can be used, and what turns ours into the caller's arrays."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None  # None: a handle says where the tokens go
    topk_weights: torch.Tensor | None
    back: Callable[[torch.Tensor], Any] | None


def check(
    buffer: Buffer,
    options: Options,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    max_rows: int | None,
    handle: Handle | None,
) -> Tensors:
    """Raises BadInput for what can't be used."""
    x, back = as_tensor("x", x)
    if scales is not None:
        scales = as_tensor("scales", scales)[0]
    _check_options(options, max_rows)
    _check_rows(buffer, options, x)
    _check_quantize(buffer, options, x, scales)
    _check_scales(buffer, options, x, scales)
    if handle is None:
        topk_idx, topk_weights = check_routing(buffer, x.shape[0], topk_idx, topk_weights)
    elif x.shape[0] != handle.num_tokens:
        raise BadInput("x", f"{x.shape[0]} tokens", f"the {handle.num_tokens} of the handle")
    return Tensors(x, scales, topk_idx, topk_weights, back)


def check_handle(buffer: Buffer, handle: Any) -> None:
    """Raises BadInput or Closed unless `handle` is one that this Buffer's dispatch made."""
    if not isinstance(handle, Handle):
        raise BadInput("handle", type(handle).__name__, "the .handle of what dispatch returned")
    if handle.buffer is not buffer:
        raise (
            Closed("handle's Buffer")
            if handle.buffer.closed
            else BadInput("handle", "one of another Buffer", "one of this Buffer")
        )


def check_num_sms(num_sms: int | None) -> None:
    """Raises BadInput unless it is None or a sensible number."""
    if num_sms is not None and not (is_integer(num_sms) and 1 <= num_sms <= 1024):
        raise BadInput("num_sms", repr(num_sms), "a whole number, 1 to 1024, or None")


def check_hashable(options: Any) -> None:
    """Raises BadInput naming the first of Options by which no plan can be found."""
    for name, value in zip(options._fields, options, strict=True):
        try:
            hash(value)
        except TypeError:
            raise BadInput(name, repr(value), "one value, and no list of them") from None


def check_max_rows(max_rows: int | None) -> None:
    """The same."""
    if max_rows is not None:
        check_integer("max_rows", max_rows, 0)


def scale_dtype(options: Options, like: Tensors) -> torch.dtype | None:
    """Of what the scales that arrive are; None without scales."""
    if options.quantize is None:
        return None if like.scales is None else like.scales.dtype
    if options.scale_format == "fp32":
        return torch.float32
    return torch.int32 if options.scale_layout == "column" else torch.float8_e8m0fnu


def scale_columns(options: Options, like: Tensors) -> int:
    """How many of them stand beside a row."""
    if like.scales is not None:
        return like.scales.shape[1]
    columns = QUANT_GROUP * (4 if options.scale_format == "ue8m0" and options.scale_layout == "column" else 1)
    return -(-like.x.shape[1] // columns)


def _check_options(options: Options, max_rows: int | None) -> None:
    check_name("layout", options.layout, LAYOUTS)
    check_alignment("expert_alignment", options.expert_alignment)
    check_name("scale_format", options.scale_format, SCALE_FORMATS)
    check_name("scale_layout", options.scale_layout, SCALE_LAYOUTS)
    check_flag("check_weights", options.check_weights)
    check_max_rows(max_rows)
    check_num_sms(options.num_sms)


def _check_rows(buffer: Buffer, options: Options, x: torch.Tensor) -> None:
    dtypes = (buffer.dtype, torch.float8_e4m3fn)
    check_tensor("x", x, device=buffer.device, dtypes=dtypes, shape=(None, buffer.hidden))
    if x.shape[0] > buffer.max_tokens:
        raise BadInput("x", f"{x.shape[0]} tokens", f"at most max_tokens = {buffer.max_tokens}")
    if x.shape[1] * x.element_size() % 16:
        raise BadInput(
            "x", f"rows of {x.shape[1]} bytes", "a multiple of 16 bytes: hidden a multiple of 16 for float8 rows"
        )
    check_rows("x", x)


def _check_quantize(buffer: Buffer, options: Options, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    if options.quantize is None:
        if options.scale_format != "fp32":
            raise BadInput(
                "scale_format", repr(options.scale_format), "quantize='fp8' beside it, whose scales it is of"
            )
        return
    if options.quantize != "fp8":
        raise BadInput("quantize", repr(options.quantize), "None or 'fp8'")
    if x.dtype is torch.float8_e4m3fn or scales is not None:
        raise BadInput("quantize", "rows that are float8 already, or scales", f"{buffer.dtype} rows alone")
    if buffer.hidden % 16:
        raise BadInput("quantize", f"hidden = {buffer.hidden}", "a multiple of 16: rows of a multiple of 16 bytes")


def _check_scales(buffer: Buffer, options: Options, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        if x.dtype is torch.float8_e4m3fn:
            raise BadInput("scales", "None", "the scales of float8 rows")
        if options.scale_layout == "column" and options.quantize is None:
            raise BadInput("scale_layout", "'column'", "scales: given, or those of quantize='fp8'")
        return
    check_tensor("scales", scales, device=buffer.device, dtypes=SCALE_TYPES, shape=(x.shape[0], None))
    if scales.shape[1] < 1 or scales.shape[1] * scales.element_size() >= 1 << 20:
        raise BadInput("scales", f"{scales.shape[1]} columns", "at least one, and rows of less than 2^20 bytes")
    if scales.numel() and scales.shape[1] > 1 and scales.stride(1) != 1:
        raise BadInput("scales", f"strides {scales.stride()}", "contiguous rows")
    if buffer.domain_ranks != buffer.num_ranks:
        shape, bytes_of_scales = buffer.session.context.shape, scales.shape[1] * scales.element_size()
        room = shape.receive_bytes - _native.landed_bytes(shape, buffer.hidden * x.element_size(), 0)
        if bytes_of_scales > room:
            raise BadInput("scales", f"rows of {bytes_of_scales} bytes", f"at most {room} between domains")
    if options.scale_layout == "column" and scales.element_size() != 4:
        raise BadInput("scales", str(scales.dtype), "elements of 4 bytes for scale_layout='column'")


def check_routing(
    buffer: Buffer, tokens: int, topk_idx: Any, topk_weights: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and weights as torch tensors that can be used; raises BadInput."""
    shape = (tokens, buffer.topk)
    if topk_idx is None:
        raise BadInput("topk_idx", "None", "expert ids, or handle= to repeat a dispatch")
    topk_idx = as_tensor("topk_idx", topk_idx)[0]
    check_tensor("topk_idx", topk_idx, device=buffer.device, dtypes=(torch.int64, torch.int32), shape=shape)
    if topk_weights is not None:
        topk_weights = as_tensor("topk_weights", topk_weights)[0]
        check_tensor("topk_weights", topk_weights, device=buffer.device, dtypes=(torch.float32,), shape=shape)
        topk_weights = topk_weights.contiguous()
    return topk_idx.contiguous(), topk_weights
