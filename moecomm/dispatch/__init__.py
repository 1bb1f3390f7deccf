"""dispatch: check what the caller passed, lay out what will arrive, say both in one struct; the backend's executor
does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native, call
from moecomm.arrays import Carver, adopt, check_rows, check_tensor, window_tensor
from moecomm.errors import BadInput, Closed
from moecomm.routed import Handle, Routed

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

LAYOUTS = ("flat", "expert", "batched")  # by Layout in csrc/protocol/args.h
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
_SCALE_TYPES = tuple(
    t for t in (torch.float32, torch.int32, torch.uint8, torch.int16, getattr(torch, "float8_e8m0fnu", None)) if t
)
QUANT_GROUP = 128


@dataclass
class Pending:
    """A dispatch that has been prepared: what the executor gets, and what will be handed out."""

    args: _native.DispatchArgs
    routed: Routed
    sync: bool
    payload: _native.Block
    back: Callable[[torch.Tensor], Any]
    inputs: tuple[Any, ...]  # alive until the executor has them


def prepare(
    buffer: Buffer,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    quantize: str | None = None,
    scales: Any = None,
    max_rows: int | None = None,
    sync: bool | None = None,
    handle: Handle | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
) -> Pending:
    """Checks the arguments (see Buffer.dispatch) and makes room for the outputs."""
    buffer.require_usable()
    session = buffer.session
    x, back = adopt("x", x)
    args = _native.DispatchArgs()
    args.ctx = session.context
    if handle is not None:
        check_handle(buffer, handle)
        if topk_idx is not None or topk_weights is not None:
            raise BadInput(
                "handle", "topk_idx or topk_weights beside it", "rows only: a handle repeats an earlier routing"
            )
        layout = handle.layout
    elif layout not in LAYOUTS:
        raise BadInput("layout", repr(layout), " or ".join(LAYOUTS))
    args.layout = LAYOUTS.index(layout)
    _take_rows(buffer, args, x, quantize, scales := None if scales is None else adopt("scales", scales)[0])
    if handle is None:
        topk_idx, topk_weights = _take_routing(buffer, args, topk_idx, topk_weights, check_weights)
        rows = _rows_to_make(buffer, layout, expert_alignment, max_rows)
        handle = Handle(buffer, layout, args.num_tokens, topk_idx)
    else:
        if args.num_tokens != handle.num_tokens:
            raise BadInput("x", f"{args.num_tokens} tokens", f"the {handle.num_tokens} of the handle")
        args.repeat = 1
        rows = handle.y_shape[0] if layout != "batched" else handle.y_shape[0] * handle.y_shape[1]
    args.alignment, args.max_rows = expert_alignment, rows
    args.chunk_tokens = 8 if args.num_tokens <= 1024 else 32
    args.workers = session.workers(check_workers(num_sms), args.num_tokens)
    args.call = call.pack(
        layout=args.layout,
        dtype=args.in_type,
        topk_idx_dtype=int(args.idx_bytes == 8),
        quantize=args.quantize,
        bytes_of_a_row_of_scales=args.scale_bytes,
        expert_alignment=expert_alignment,
        handle_given=args.repeat,
    )
    payload, routed = _make_room(buffer, args, handle, rows, x.dtype, scales)
    sync = session.device.type == "cpu" if sync is None else sync
    return Pending(args, routed, sync, payload, back, (x, scales, topk_idx, topk_weights))


def finish(buffer: Buffer, pending: Pending) -> Routed:
    """Hands out what arrived; with `sync` exactly that, after waiting for it."""
    routed, handle = pending.routed, pending.routed.handle
    if pending.sync:
        buffer.session.synchronize()
        buffer.raise_failure()
        if handle.layout != "batched" and not pending.args.repeat:
            rows = int(routed.num_rows.item())
            for name in ("x", "scales", "src", "topk_idx", "topk_weights", "row_weights"):
                if (tensor := getattr(routed, name)) is not None:
                    setattr(routed, name, tensor[:rows])
            handle.y_shape = (rows, buffer.hidden)
            pending.payload.shrink(max(1, pending.args.out_x - pending.payload.offset + rows * pending.args.row_bytes))
    if not pending.args.repeat:
        handle.routed = replace(routed, x=None, scales=None, handle=None)  # type: ignore[arg-type]
    for name in ("x", "scales", "tokens_per_expert", "num_rows", "src", "topk_idx", "topk_weights", "row_weights"):
        if (tensor := getattr(routed, name)) is not None:
            setattr(routed, name, pending.back(tensor))
    return routed


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


def check_workers(num_sms: int | None) -> int | None:
    """Raises BadInput unless `num_sms` is None or a sensible number."""
    if num_sms is not None and not 1 <= num_sms <= 1024:
        raise BadInput("num_sms", num_sms, "1 to 1024, or None")
    return num_sms


def _take_rows(
    buffer: Buffer, args: _native.DispatchArgs, x: torch.Tensor, quantize: str | None, scales: torch.Tensor | None
) -> None:
    device = buffer.device
    check_tensor("x", x, device=device, dtypes=(buffer.dtype, torch.float8_e4m3fn), shape=(None, buffer.hidden))
    if x.shape[0] > buffer.max_tokens:
        raise BadInput("x", f"{x.shape[0]} tokens", f"at most max_tokens = {buffer.max_tokens}")
    if x.shape[1] * x.element_size() % 16:
        raise BadInput(
            "x", f"rows of {x.shape[1]} bytes", "a multiple of 16 bytes: hidden a multiple of 16 for float8 rows"
        )
    args.x, args.x_stride = x.data_ptr(), check_rows("x", x)
    args.num_tokens, args.hidden, args.in_type = x.shape[0], buffer.hidden, _TYPES[x.dtype]
    args.row_bytes = buffer.hidden * x.element_size()
    if quantize is not None:
        if quantize != "fp8":
            raise BadInput("quantize", repr(quantize), "None or 'fp8'")
        if x.dtype is torch.float8_e4m3fn or scales is not None:
            raise BadInput("quantize", "rows that are float8 already, or scales", f"{buffer.dtype} rows alone")
        if buffer.hidden % 16:
            raise BadInput("quantize", f"hidden = {buffer.hidden}", "a multiple of 16: rows of a multiple of 16 bytes")
        args.quantize, args.row_bytes = 1, buffer.hidden
        args.scale_bytes = 4 * -(-buffer.hidden // QUANT_GROUP)
    if scales is not None:
        check_tensor("scales", scales, device=device, dtypes=_SCALE_TYPES, shape=(x.shape[0], None))
        if scales.numel() and not scales[0].is_contiguous():
            raise BadInput("scales", f"strides {scales.stride()}", "contiguous rows")
        args.in_scales = scales.data_ptr()
        args.in_scales_stride = scales.stride(0) * scales.element_size()
        args.scale_bytes = scales.shape[1] * scales.element_size()
    elif x.dtype is torch.float8_e4m3fn:
        raise BadInput("scales", "None", "the scales of float8 rows")


def _take_routing(
    buffer: Buffer, args: _native.DispatchArgs, topk_idx: Any, topk_weights: Any, check_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (args.num_tokens, buffer.topk)
    if topk_idx is None:
        raise BadInput("topk_idx", "None", "expert ids, or handle= to repeat a dispatch")
    topk_idx = adopt("topk_idx", topk_idx)[0]
    check_tensor("topk_idx", topk_idx, device=buffer.device, dtypes=(torch.int64, torch.int32), shape=shape)
    topk_idx = topk_idx.contiguous()
    args.topk_idx, args.idx_bytes = topk_idx.data_ptr(), topk_idx.element_size()
    if topk_weights is not None:
        topk_weights = adopt("topk_weights", topk_weights)[0]
        check_tensor("topk_weights", topk_weights, device=buffer.device, dtypes=(torch.float32,), shape=shape)
        topk_weights = topk_weights.contiguous()
        args.topk_weights = topk_weights.data_ptr()
    args.check_weights = int(check_weights)
    return topk_idx, topk_weights


def _rows_to_make(buffer: Buffer, layout: str, alignment: int, max_rows: int | None) -> int:
    if not 1 <= alignment < 1 << 20:
        raise BadInput("expert_alignment", alignment, "1 to 2^20 - 1")
    worst = buffer.settings.worst_rows(layout, alignment)
    if max_rows is None or layout == "batched":
        return worst
    if max_rows < 0:
        raise BadInput("max_rows", max_rows, "0 or more")
    return min(max_rows, worst)


def _make_room(
    buffer: Buffer,
    args: _native.DispatchArgs,
    handle: Handle,
    rows: int,
    dtype: torch.dtype,
    scales: torch.Tensor | None,
) -> tuple[_native.Block, Routed]:
    """Allocates the outputs in the window, puts their places into `args`, and makes the tensors over them."""
    shape: tuple[int, ...] = (rows,)
    if handle.layout == "batched":
        shape = (buffer.num_experts // buffer.num_ranks, buffer.num_ranks * buffer.max_tokens)
    carver = Carver()
    scales_at = carver.room(rows, args.scale_bytes)
    rows_at = carver.room(rows, args.row_bytes)  # last: what no row has arrived in can be given back
    payload = buffer.memory.allocate(max(1, carver.nbytes))
    if not args.repeat:
        handle.y_shape = (*shape, buffer.hidden)
        _make_route(buffer, args, handle, rows, shape)
    args.route = handle.route
    args.out_x = payload.offset + rows_at

    def tensor(at: int, row: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return _tensor(buffer, payload, at, (*shape, *row), kind)

    kind = torch.float8_e4m3fn if args.quantize else dtype
    arrived = replace(handle.routed) if handle.routed is not None else Routed(*[None] * 9)  # type: ignore[arg-type]
    arrived.x, arrived.handle = tensor(rows_at, (buffer.hidden,), kind), handle
    if args.scale_bytes:
        args.out_scales = payload.offset + scales_at
        scale_kind = torch.float32 if scales is None else scales.dtype
        arrived.scales = tensor(scales_at, (args.scale_bytes // scale_kind.itemsize,), scale_kind)
    if args.repeat:
        return payload, arrived
    return payload, _with_route_tensors(buffer, args, handle, shape, arrived)


def _tensor(buffer: Buffer, block: _native.Block, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    session = buffer.session
    base = session.context.peers[buffer.rank]
    return window_tensor(block, base + block.offset + at, shape, dtype, session.device, session.owner)


def _make_route(buffer: Buffer, args: _native.DispatchArgs, handle: Handle, rows: int, shape: tuple[int, ...]) -> None:
    """The pieces of the handle: one block, so that it comes and goes in one go."""
    ranks, topk, tokens = buffer.num_ranks, buffer.topk, args.num_tokens
    flat = handle.layout == "flat"
    flat_rows = ranks * buffer.max_tokens
    carver = Carver()
    src = carver.room(rows, 8)
    idx = carver.room(rows, topk * args.idx_bytes if flat else 0)
    weights = carver.room(rows, topk * 4 if flat else 4)
    arrived_rows = carver.room(0 if flat else flat_rows, topk * 4)
    token_rows = carver.room(tokens, topk * 4)
    token_owner = carver.room(tokens, topk * 4)
    token_slot = carver.room(tokens, ranks * 4)
    slot_base = carver.room(ranks, 4)
    source_base = carver.room(ranks + 1, 4)
    per_expert = carver.room(buffer.num_experts // ranks, 4)
    num_rows = carver.room(1, 4)
    block = buffer.memory.allocate(max(1, carver.nbytes))
    base = buffer.session.context.peers[buffer.rank] + block.offset
    handle.block = block
    route = handle.route
    route.token_rows, route.token_owner, route.token_slot = base + token_rows, base + token_owner, base + token_slot
    route.slot_base, route.source_base = base + slot_base, base + source_base
    route.rows, route.row_weights = (0, 0) if flat else (base + arrived_rows, base + weights)
    args.out_src, args.out_weights = block.offset + src, block.offset + weights
    args.out_topk_idx = block.offset + idx if flat else 0
    args.out_rows = 0 if flat else block.offset + arrived_rows
    args.tokens_per_expert, args.num_rows = base + per_expert, base + num_rows


def _with_route_tensors(
    buffer: Buffer, args: _native.DispatchArgs, handle: Handle, shape: tuple[int, ...], routed: Routed
) -> Routed:
    block, flat = handle.block, handle.layout == "flat"
    assert block is not None
    base = buffer.session.context.peers[buffer.rank] + block.offset

    def tensor(at: int, full: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return _tensor(buffer, block, at, full, kind)

    routed.src = tensor(args.out_src - block.offset, (*shape, 2), torch.int32)
    routed.tokens_per_expert = tensor(
        args.tokens_per_expert - base, (buffer.num_experts // buffer.num_ranks,), torch.int32
    )
    routed.num_rows = tensor(args.num_rows - base, (1,), torch.int32)
    weights_at = args.out_weights - block.offset
    if flat:
        kind = torch.int64 if args.idx_bytes == 8 else torch.int32
        routed.topk_idx = tensor(args.out_topk_idx - block.offset, (*shape, buffer.topk), kind)
        routed.topk_weights = tensor(weights_at, (*shape, buffer.topk), torch.float32)
    else:
        routed.row_weights = tensor(weights_at, shape, torch.float32)
    return routed
