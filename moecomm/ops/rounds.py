"""Operators for the rounds of a Buffer, with tensors, numbers and strings as arguments, and their fake implementations.

Shapes of outputs depend on shapes of inputs alone; counts on the device say what arrived.  So no operator waits for a
GPU, and graphs of torch.compile or CUDA can capture them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from moecomm.base import formats, tangents
from moecomm.base.arrays import check_memory, check_tensor
from moecomm.base.choices import CombineWire, Layout, Quantize, ScaleFormat
from moecomm.base.validation import are_plain
from moecomm.combine import combine as run_combine
from moecomm.combine import options as combine_options
from moecomm.dispatch import dispatch as run_dispatch
from moecomm.dispatch import options as dispatch_options
from moecomm.dispatch.drop import drop_checked
from moecomm.dispatch.routed import Handle as NativeHandle
from moecomm.dispatch.routed import Routed
from moecomm.dispatch.tables import tables_of
from moecomm.errors import BadInput
from moecomm.gpu import padding
from moecomm.ops import handles
from moecomm.ops.operator import operator
from moecomm.ops.tidy import About, tidied
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall


class Cast(NamedTuple):
    """Format in which rows travel; see moecomm.ops.dispatch."""

    quantize: str | None = None
    scale_format: str = "fp32"
    global_scale: torch.Tensor | None = None
    dequantize: bool = True


_NO_CAST = Cast()


@operator("drop")
def drop(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    expert_alignment: int,
    max_rows: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator of overflow="drop": see moecomm.dispatch.drop."""
    how = (cast("Layout", layout), expert_alignment, max_rows)
    owner = names.find(buffer)
    ids, entries = drop_checked(owner, *how, owner.experts.own_ids(topk_idx), topk_weights)
    experts = owner.experts
    as_given = experts.ids is None and experts.live is None and owner.slots is None
    return (ids if as_given else torch.where(ids < 0, ids, topk_idx)), entries


@drop.register_fake
def _(topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(topk_idx), topk_idx.new_empty((1,), dtype=torch.int32)


@operator("dispatch")
def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    expert_alignment: int,
    max_rows: int,
    zero_padding: bool,
    num_sms: int | None = None,
    first_token: int | None = None,
    gradients: int = 0,
    layer: int = 0,
    quantize: str | None = None,
    scale_format: str = "fp32",
    global_scale: torch.Tensor | None = None,
    dequantize: bool = True,
    grad_wire: torch.dtype | None = None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:  # x, scales, weights, topk_idx, src, tokens_per_expert, num_rows, memory, graph
    """Operator of moecomm.ops.dispatch.

    Args:
        max_rows: -1: as the Buffer says.
        first_token: see moecomm.dispatch.prepare.
        gradients: see dispatch_options.Gradients.
        layer: here and below: see Handle.
        grad_wire: `wire` of the combine that the backward pass makes.
    """
    tangents.refuse("moecomm::dispatch", x, topk_weights)
    how = (buffer, layout, expert_alignment, max_rows, zero_padding, num_sms, first_token)
    cast_to = Cast(quantize, scale_format, global_scale, dequantize)
    return *run_new(x, topk_idx, topk_weights, *how, layer, "dispatch", gradients, cast_to), x.new_empty(0)


def run_new(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer: str,
    layout: str,
    expert_alignment: int,
    max_rows: int,
    zero_padding: bool,
    num_sms: int | None,
    first_token: int | None,
    layer: int,
    call: str,
    gradients: int = 0,
    cast_to: Cast = _NO_CAST,
    copies: Callable[[], None] | None = None,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Run a dispatch with routing: the operator's arguments, and the call of the user that it belongs to.

    `copies`: see moecomm.dispatch.prepare.
    """
    owner = names.find(buffer)
    _check_rows(owner, x)
    options = _options(cast_to, cast("Layout", layout), expert_alignment, num_sms)
    wanted, ids = dispatch_options.Gradients(gradients), topk_idx.contiguous()
    routed = run_dispatch(
        owner,
        dispatch_options.Request(options, call, layer, wanted),
        rows_of(x),
        ids if owner.experts.ids is None and owner.experts.live is None else owner.experts.own_ids(ids),
        None if topk_weights is None else topk_weights.contiguous(),
        max_rows=None if max_rows < 0 else max_rows,
        sync=False,
        first_token=first_token,
        copies=copies,
        global_scale=cast_to.global_scale,
    )
    handles.remember(owner, routed)
    memory = tables_of(routed)
    rows: torch.Tensor = routed.plan.rows_tensor(routed)
    scales: torch.Tensor | None = None
    if cast_to.quantize is not None:
        rows, scales = rows_as_asked(owner, routed, cast_to)
    found = About(*routed.plan.table_tensors(routed))
    about = tidied(layout, found, rows if zero_padding else None)
    if zero_padding and scales is not None:
        padding.zero(scales, **padding.told(layout, found.src, found.tokens_per_expert, found.num_rows))
    local_idx = topk_idx.new_empty(0) if about.ids is None else about.ids
    scales = x.new_empty(0) if scales is None else scales
    return rows, scales, about.weights, local_idx, about.src, about.tokens_per_expert, about.num_rows, memory


def _check_rows(owner: Rounds, x: torch.Tensor) -> None:
    """Raise BadInput for other rows than those of the Buffer, which a dispatch would take for bytes."""
    if x.dtype is owner.dtype and x.ndim == 2 and x.shape[1] == owner.hidden and are_plain(x):
        return  # the round looks at the rest
    with CollectiveCall(owner):
        check_tensor("x", x, device=owner.device, dtypes=(owner.dtype,), shape=(None, owner.hidden))


def _options(
    cast_to: Cast, layout: Layout = "expert", expert_alignment: int = 1, num_sms: int | None = None
) -> dispatch_options.Options:
    name, scale_format = cast("Quantize | None", cast_to.quantize), cast("ScaleFormat", cast_to.scale_format)
    return dispatch_options.Options(layout, expert_alignment, name, scale_format, num_sms=num_sms)


def rows_as_asked(owner: Rounds, routed: Routed, cast_to: Cast) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return contiguous rows that have arrived: in the Buffer's dtype, or in their format with their scales."""
    if cast_to.quantize is None:
        return routed.x, None
    rows, scales = routed.x, routed.scales
    if not cast_to.dequantize:
        return rows.contiguous(), None if scales is None else scales.contiguous()
    shape = rows.shape[:-1]
    found = formats.dequantize(
        rows.reshape(-1, rows.shape[-1]),
        None if scales is None else scales.reshape(-1, scales.shape[-1]),
        cast_to.quantize,
        global_scale=cast_to.global_scale,
        dtype=owner.dtype,
    )
    return found.view(*shape, -1), None


@dispatch.register_fake
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: str,
    layout: str,
    expert_alignment: int,
    max_rows: int,
    quantize: str | None,
    scale_format: str,
    dequantize: bool,
) -> tuple[torch.Tensor, ...]:
    settings = (owner := names.find(buffer)).settings
    if max_rows < 0:
        rows = settings.capacity_rows(layout, expert_alignment, rank=owner.rank)
    else:
        rows = settings.worst_rows(layout, expert_alignment, max_rows, rank=owner.rank)
    shape, local = rows_shape(owner, layout, rows), len(owner.local_experts)
    flat = layout == "flat"
    arrived, scales = x.new_empty((*shape, owner.hidden)), x.new_empty(0)
    if quantize is not None and not dequantize:
        fmt = formats.FORMATS[quantize]
        arrived = x.new_empty((*shape, fmt.value_columns(owner.hidden)), dtype=fmt.values)
        if (scales_dtype := fmt.scales_as(cast("ScaleFormat", scale_format))) is not None:
            scales = x.new_empty((*shape, fmt.scale_columns(owner.hidden)), dtype=scales_dtype)
    return (
        arrived,
        scales,
        x.new_empty((rows, owner.topk) if flat else shape, dtype=torch.float32),
        topk_idx.new_empty((rows, owner.topk) if flat else (0,)),
        x.new_empty((*shape, 2), dtype=torch.int32),
        x.new_empty((local,), dtype=torch.int32),
        x.new_empty((1,), dtype=torch.int32),
        x.new_empty((handles.memory_bytes(owner, layout, rows),), dtype=torch.uint8),
        x.new_empty(0),
    )


@operator("dispatch_again")
def dispatch_again(
    x: torch.Tensor,
    memory: torch.Tensor,
    buffer: str,
    layout: str,
    max_rows: int,
    zero_padding: bool,
    num_sms: int | None = None,
    gradients: int = 0,
    backward: bool = False,
    layer: int = 0,
    quantize: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator of moecomm.ops.dispatch_again: [T, H] -> rows in the shape of the earlier dispatch's x, and graph.

    `backward`: the backward pass of a combine makes the call.  `quantize`: the format in which rows travel.
    """
    tangents.refuse("moecomm::dispatch_again", x)
    call = "backward of combine" if backward else "dispatch"
    how = (buffer, layout, max_rows, zero_padding, num_sms, layer)
    return run_again(x, memory, *how, call, gradients, Cast(quantize)), x.new_empty(0)


def run_again(
    x: torch.Tensor,
    memory: torch.Tensor,
    buffer: str,
    layout: str,
    max_rows: int,
    zero_padding: bool,
    num_sms: int | None,
    layer: int,
    call: str,
    gradients: int = 0,
    cast_to: Cast = _NO_CAST,
) -> torch.Tensor:
    """Run a dispatch by a handle: the operator's arguments, and the call of the user that it belongs to."""
    owner = names.find(buffer)
    handle = handles.restore(memory, buffer, layout, max_rows, len(x))
    _check_rows(owner, x)
    wanted = dispatch_options.Gradients(gradients)
    request = dispatch_options.Request(_options(cast_to, num_sms=num_sms), call, layer, wanted)
    routed = run_dispatch(owner, request, rows_of(x), handle=handle, sync=False)
    rows: torch.Tensor = routed.plan.rows_tensor(routed)
    if cast_to.quantize is not None:
        rows, _ = rows_as_asked(owner, routed, cast_to)
    if zero_padding:
        padding.zero(rows, **padding.told(layout, handles.sources(handle), *handles.counts(handle)))
    return rows


@dispatch_again.register_fake
def _(x: torch.Tensor, buffer: str, layout: str, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    owner = names.find(buffer)
    return x.new_empty((*rows_shape(owner, layout, max_rows), owner.hidden)), x.new_empty(0)


@operator("combine")
def combine(
    y: torch.Tensor,
    row_weights: torch.Tensor | None,
    memory: torch.Tensor,
    buffer: str,
    layout: str,
    max_rows: int,
    num_tokens: int,
    wire: str | None,
    zero_padding: bool,
    num_sms: int | None = None,
    graph: torch.Tensor | None = None,
    gradients: bool = False,
    layer: int = 0,
    grad_wire: str | None = None,
) -> torch.Tensor:
    """Operator of moecomm.ops.combine: rows -> [T, H].

    Args:
        wire: see wire_named().
        zero_padding: for the gradient of y.
        graph: of the handle.  Not read: with it, the backward passes of dispatches follow that of the combine, also
            where y does not depend on their rows.
        gradients: this rank wants some.
        grad_wire: format in which the rows of the backward pass travel.
    """
    tangents.refuse("moecomm::combine", y, row_weights)
    handle = handles.restore(memory, buffer, layout, max_rows, num_tokens)
    owner, weights = handle.rounds, None
    options = combine_options.Options(row_weights is not None, wire_named(wire), num_sms)
    if row_weights is not None:
        with CollectiveCall(owner):
            weights = _where_peers_read(owner, handle, row_weights, options.unsummed)
        handle.args.route.row_weights = weights.data_ptr()
    request = combine_options.Request(options, "combine", layer, gradients)
    out: torch.Tensor = run_combine(owner, request, rows_of(y), handle)
    return out


@combine.register_fake
def _(y: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return y.new_empty((num_tokens, y.shape[-1]))


@operator("dispatch_backward")
def dispatch_backward(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    memory: torch.Tensor,
    buffer: str,
    layout: str,
    max_rows: int,
    num_tokens: int,
    num_sms: int | None = None,
    graph: torch.Tensor | None = None,
    layer: int = 0,
    wire: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map gradients of rows and of their weights to those of x [T, H] and topk_weights [T, K] ([0] without weights).

    `graph`: the gradient of the handle's.  Not read: with it, compilers keep the round that it comes from, before this.
    """
    tangents.refuse("moecomm::dispatch_backward", x, weights)
    how = (buffer, layout, max_rows, num_tokens, num_sms, layer)
    return run_back(x, weights, memory, *how, "backward of dispatch", wire)


def run_back(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    memory: torch.Tensor,
    buffer: str,
    layout: str,
    max_rows: int,
    num_tokens: int,
    num_sms: int | None,
    layer: int,
    call: str,
    wire: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the combine of a backward pass: the operator's arguments, and the call of the user that it belongs to."""
    handle = handles.restore(memory, buffer, layout, max_rows, num_tokens)
    owner = handle.rounds
    request = combine_options.Request(combine_options.Options(False, wire, num_sms), call, layer)
    if weights is None:
        grad = run_combine(owner, request, rows_of(x), handle)
        return grad, x.new_empty(0, dtype=torch.float32)
    grads: tuple[torch.Tensor, torch.Tensor] = run_combine(
        owner, request, rows_of(x), handle, weight_grads=weights.contiguous()
    )
    return grads


@dispatch_backward.register_fake
def _(x: torch.Tensor, weights: torch.Tensor | None, buffer: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    topk = names.find(buffer).topk
    grad = x.new_empty((num_tokens, x.shape[-1]))
    return grad, x.new_empty((0,) if weights is None else (num_tokens, topk), dtype=torch.float32)


def wanted_gradients(
    rows: torch.Tensor, weights: torch.Tensor | None = None, *others: torch.Tensor | None
) -> dispatch_options.Gradients:
    """Return which gradients this rank wants of a round of these tensors."""
    wanted = dispatch_options.Gradients
    if not torch.is_grad_enabled():
        return wanted.NONE
    if weights is not None and weights.requires_grad:
        return wanted.WEIGHTS
    for tensor in (rows, *others):
        if tensor is not None and tensor.requires_grad:
            return wanted.ROWS
    return wanted.NONE


def rows_shape(rounds: Rounds, layout: str, rows: int) -> tuple[int, ...]:
    """Return the shape of rows without their last dimension."""
    local = len(rounds.local_experts)
    return (local, rows // local) if layout == "batched" else (rows,)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous, 16-byte aligned copy as rounds need it: gradients may be expanded or transposed."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def wire_named(name: str | None) -> CombineWire | None:
    """Return the `wire` of a combine by the name that operators take: "rows", or that of a dtype."""
    return cast("CombineWire | None", name if name in (None, "rows") else getattr(torch, name))


def _where_peers_read(rounds: Rounds, handle: NativeHandle, weights: torch.Tensor, unsummed: bool) -> torch.Tensor:
    """Return the weights of rows at a place that peers can read, after checks.  Raises BadInput.

    Ranks that read rows from this rank's window read the rows' weights from it as well: CPU ranks do, and others where
    rows travel unsummed.
    """
    shape = handle.plan.rows_shape(handle.args)
    if weights.shape != shape or weights.dtype is not torch.float32 or weights.device != rounds.device:
        got = f"{weights.dtype} {tuple(weights.shape)} on {weights.device}"
        raise BadInput("row_weights", got, f"torch.float32 {shape} on {rounds.device}, and none for layout='flat'")
    check_memory("row_weights", weights)
    weights = weights.contiguous()
    if not (rounds.session.peers_read_weights or unsummed):
        return weights
    return rounds.copy_to(rounds.memory.scratch(weights.nbytes), weights)
