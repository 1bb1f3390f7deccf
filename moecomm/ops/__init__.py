"""dispatch, combine and the whole layer as torch operators, with gradients and support for torch.compile.

    routed = moecomm.ops.dispatch(buffer, x, topk_idx, topk_weights)
    y = experts(routed.x, routed.tokens_per_expert)
    out = moecomm.ops.combine(y, routed.handle)

    out = moecomm.ops.moe(buffer, x, topk_idx, topk_weights, w13, w2)  # all of it, with SwiGLU experts

Differences from the methods of Buffer:

- Shapes never depend on what arrives: outputs have `max_rows` rows, and counts stay on the device.
- Rows may travel in the formats of moecomm.formats, forward and backward; gradients see through the casts.
- x, y and the routing weights have gradients.  The rounds of backward passes are collective, too: every rank that took
  part in the forward pass runs the backward pass, in the same order.  So does a rank whose experts got no token: the
  handle leads from combine to dispatch.  Ranks that want different gradients raise Mismatch in the forward pass.
- A handle consists of tensors, strings and numbers.

A compiler may reorder rounds that do not depend on each other, and differently on ranks whose tensors have other sizes.
Consecutive layers do depend on each other; parallel branches should share a dispatch, or be compiled separately.

Second-order gradients of rounds and forward-mode AD raise Unsupported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from moecomm.base import formats, tangents
from moecomm.base.arrays import as_tensor, shown_tensors
from moecomm.base.choices import (
    BALANCES,
    Activation,
    Balance,
    CombineWire,
    Layout,
    Overflow,
    Quantize,
    ScaleFormat,
    Wire,
    dtype_of_wire,
    is_unsummed,
)
from moecomm.base.known import checked_once
from moecomm.base.validation import (
    are_plain,
    check_flag,
    check_flags,
    check_integer,
    check_name,
    check_real,
    check_same_device,
)
from moecomm.buffer import Buffer
from moecomm.combine import options as combine_options
from moecomm.dispatch.arguments import check_max_rows
from moecomm.dispatch.options import Gradients, Options, check_num_sms, check_options, check_overflow
from moecomm.errors import BadInput, TooManyRows
from moecomm.fused.activations import check_activation
from moecomm.fused.formats import as_weights
from moecomm.fused.layer import check_dropped, fused_or_not
from moecomm.ops import chunks, gradients, rounds
from moecomm.ops import layer as whole_layer
from moecomm.ops.chunks import ChunkedHandle
from moecomm.ops.counted import counted
from moecomm.ops.handles import Handle, deep_copied
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.signature import LAYERS
from moecomm.rounds.state import several_rounds
from moecomm.weights import slots

__all__ = ["ChunkedHandle", "Dispatched", "Handle", "combine", "dispatch", "dispatch_again", "moe", "slot_weights"]

gradients.register()
_NUMBER, _TENSOR, _NONE = (int, torch.SymInt), torch.Tensor, type(None)
# Formats for gradients: the others take a scale of all values.
GRAD_WIRES = tuple(name for name, fmt in formats.FORMATS.items() if not fmt.takes_global)
_FIELDS: tuple[Any, ...] = (  # types of those of Handle
    _TENSOR,
    (_TENSOR, _NONE),
    str,
    str,
    _NUMBER,
    _NUMBER,
    bool,
    (*_NUMBER, _NONE),
    (_TENSOR, _NONE),
    _NUMBER,
)


class Dispatched(NamedTuple):
    """The received tokens, like moecomm.Routed, in tensors of `max_rows` rows.

    Attributes:
        x: `[rows, H]` (batched: `[E/R, rows, H]`, and so for other attributes) of the Buffer's dtype, or with
            `dequantize=False` values of the format, in as many columns as it has.  Rows without a token are zeros, or
            not initialized with `zero_padding=False`.
        tokens_per_expert: int32 `[E/R]`.
        num_rows: int32 `[1]`: rows in use, as in moecomm.Routed.
        src: int32 `[rows, 2]`: source rank and token of each row, or -1, -1.
        row_weights: expert, batched: float32 `[rows]`: the routing weight of each row, or 0.
        topk_idx: flat: int64 `[rows, K]`: local expert ids, or -1.
        topk_weights: flat: float32 `[rows, K]`, 0 where topk_idx is -1; the caller's experts apply them.
        handle: for combine() and dispatch_again().
        dropped: int32 `[1]`: entries of this rank's `topk_idx` that found no room; None unless `overflow="drop"`.
        scales: `[rows, S]`: of the values in `x`, zeros where those are; None unless `dequantize=False`, and of formats
            without scales.
    """

    x: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor
    src: torch.Tensor
    row_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Handle | ChunkedHandle
    dropped: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def __repr__(self) -> str:
        return shown_tensors("moecomm.ops.Dispatched", self._asdict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatched:
        return deep_copied(self, memo)


@counted("buffer", 0)
def dispatch(
    buffer: Buffer | str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    layout: Layout = "expert",
    expert_alignment: int = 1,
    max_rows: int | None = None,
    zero_padding: bool = True,
    num_sms: int | None = None,
    overflow: Overflow | None = None,
    layer: int = 0,
    quantize: Quantize | None = None,
    scale_format: ScaleFormat = "fp32",
    x_global_scale: float | torch.Tensor | None = None,
    dequantize: bool = True,
    grad_wire: Wire | None = None,
) -> Dispatched:
    """Dispatch tokens like Buffer.dispatch.  Collective.  Gradients: x, topk_weights.

    With `quantize`, tokens travel in a format of moecomm.formats.  The rows that arrive are
    formats.dequantize(formats.quantize(x)) in the Buffer's dtype, so any experts can train on them.  The gradient sees
    through the cast (straight-through): that of x is what the combine of the rows' gradients returns.

    Args:
        buffer: a Buffer, or its `name`.
        x: `[T, H]` of the Buffer's dtype.
        topk_idx: int64 or int32 `[T, K]`; -1 picks none.
        topk_weights: floating `[T, K]`, used in float32; None: every weight is 1.
        layout: "expert", "flat" or "batched".
        expert_alignment: layout "expert": groups start at multiples of it.
        max_rows: rows to make room for (batched: for each expert); default: by the Buffer's capacity_factor.
        zero_padding: write zeros to rows without a token, also in the gradient of y, so that sums over all rows are
            right.  False saves a pass over the rows; use it if the experts read only rows that the counts cover.
        num_sms: see Buffer.dispatch; also used by all rounds with the handle and by backward passes.
        overflow: see Buffer.dispatch.  "chunks": the host waits for the rows, which no graph can; None: "chunks" on
            CPUs, "error" on GPUs and in graphs.
        layer: number of the layer among those of the Buffer, 1 to 16383, the same on all ranks; 0: it has none.  All
            rounds with the handle and of backward passes carry it, so that layers that a rank runs in another order
            are a Mismatch.
        quantize: None: rows travel in the Buffer's dtype; else a format, see Buffer.dispatch.
        scale_format: see Buffer.dispatch.
        x_global_scale: see Buffer.dispatch.  Ranks compare it, since rows are dequantized with that of the rank
            where they arrive.
        dequantize: False: `Dispatched.x` has the values of the format, and `Dispatched.scales` their scales by row.
            They have no gradients.
        grad_wire: `wire` of the combine of the backward pass, see Buffer.combine; rows to be added there have the
            Buffer's dtype.

    Returns:
        A Dispatched.

    Raises:
        As Buffer.dispatch; BadInput for `dequantize=False` where a gradient of x or topk_weights is wanted; Mismatch
        in the backward pass where ranks differ in `grad_wire`.
    """
    name = _name_of(buffer)
    x, topk_idx, weights, plain = _routed(x, topk_idx, topk_weights)
    words = (layout, expert_alignment, quantize, scale_format, num_sms, zero_padding, dequantize, max_rows, overflow)
    grad_dtype = checked_once(_check_words, *words, layer, grad_wire, x.dtype)
    if not dequantize and rounds.wanted_gradients(x, weights) is not Gradients.NONE:
        want = "True, or quantize= of a format under torch.no_grad()"
        raise BadInput("dequantize", "False where a gradient is wanted", want)
    scale = None if x_global_scale is None else _global_scale_of(x_global_scale, x)
    cast_to = (quantize, scale_format, scale, bool(dequantize))
    if not plain:
        tangents.refuse("moecomm.ops.dispatch", x, weights)
    run = rounds.dispatch.plainly if plain and scale is None else rounds.dispatch
    topk_idx = topk_idx.long() if topk_idx.dtype == torch.int32 else topk_idx
    dropped = None
    if overflow == "drop":
        priorities = None if weights is None else weights.detach()
        topk_idx, dropped = rounds.drop(topk_idx, priorities, name, layout, expert_alignment, max_rows)

    def one(
        x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor | None, alignment: int, first_token: int | None
    ) -> chunks.Outputs:
        room = -1 if max_rows is None else max_rows
        wanted = rounds.wanted_gradients(x, weights)
        about = (name, layout, alignment, room, bool(zero_padding), num_sms, first_token, wanted, layer)
        found = run(x, topk_idx, weights, *about, *cast_to, grad_dtype)
        rows, scales, row_weights, local_idx, src, tokens_per_expert, num_rows, memory, graph = found
        room, flat = src.numel() // 2, layout == "flat"
        route = (name, layout, x.shape[0], room, bool(zero_padding), num_sms)
        handle = Handle(memory, None if flat else row_weights, *route, graph, layer)
        ids = local_idx if flat else None
        shown = None if dequantize or scales.ndim == 1 else scales
        return chunks.Outputs(rows, tokens_per_expert, num_rows, src, row_weights, ids, handle, shown)

    whole = (x, topk_idx, weights, expert_alignment, None)
    if max_rows is not None or overflow in ("drop", "error") or (owner := _waiting(name, overflow)) is None:
        return _dispatched(one(*whole), dropped)

    def waiting(
        x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor | None, alignment: int, first_token: int | None
    ) -> chunks.Outputs:
        arrived = one(x, topk_idx, weights, alignment, first_token)
        if not owner.on_cpu:
            owner.check()  # there the call above raises no error of its round
        return arrived

    if not owner.on_cpu:
        owner.check()  # raises the error of an earlier round
    owner.turn.several = True  # until it is known that the rows have room in one round
    with contextlib.suppress(TooManyRows):
        arrived = waiting(*whole)
        owner.turn.several = False  # by hand: each call of ops passes here
        return _dispatched(arrived)
    # Outside of the block, no traceback holds the memory of that round.
    some = partial(waiting, alignment=1)
    given = x, topk_idx, weights
    return _dispatched(several_rounds(owner, lambda: chunks.dispatch(name, layout, expert_alignment, given, some)))


@counted("handle", 1)
def dispatch_again(x: torch.Tensor, handle: Handle | ChunkedHandle) -> torch.Tensor:
    """Send other rows along the route of an earlier dispatch.  Collective.  Gradient: x.

    Args:
        x: `[T, H]` of the Buffer's dtype, with the T of that dispatch.
        handle: of that dispatch.

    Returns:
        Rows in the shape and order of that dispatch's `Dispatched.x`.

    Raises:
        As Buffer.dispatch; also BadInput for a handle that is not a moecomm.ops.Handle.
    """
    if isinstance(handle, chunks.ChunkedHandle):
        x, owner = as_tensor("x", x)[0], names.find(handle.buffer)
        return several_rounds(owner, lambda: chunks.dispatch_again(x, handle, dispatch_again))
    _check_handle(handle)
    x = as_tensor("x", x)[0]
    check_same_device(x=x, handle=handle.memory, graph=handle.graph)
    if x.ndim != 2:
        raise BadInput("x", f"shape {tuple(x.shape)}", "[tokens, hidden]")
    tangents.refuse("moecomm.ops.dispatch_again", x)
    wanted = rounds.wanted_gradients(x)
    leads = None if wanted is Gradients.NONE else handle.graph
    if leads is not None and leads.is_leaf and leads.requires_grad:
        raise BadInput("handle", "a graph that requires a gradient of its own", "the graph of a dispatch, or None")
    rows: torch.Tensor
    rows, graph = rounds.dispatch_again(
        x,
        handle.memory,
        handle.buffer,
        handle.layout,
        handle.max_rows,
        handle.zero_padding,
        handle.num_sms,
        wanted,
        layer=handle.layer,
    )
    if leads is not None:
        leads.add_(graph)  # both empty: combines from now on lead to this round as well
    return rows


@counted("handle", 1)
def combine(
    y: torch.Tensor,
    handle: Handle | ChunkedHandle,
    *,
    weighted: bool = True,
    wire: CombineWire | None = None,
    grad_wire: Quantize | None = None,
) -> torch.Tensor:
    """Combine rows like Buffer.combine.  Collective.  Gradients: y and the handle's row_weights.

    The gradient of row_weights reaches topk_weights through the backward pass of the dispatch.

    Args:
        y: rows in the shape and order of `Dispatched.x`.  The gradient is computed in the Buffer's dtype and returned
            in the dtype of y.
        handle: of the dispatch.
        weighted: layouts "expert" and "batched": multiply each row by `handle.row_weights`.
        wire: see Buffer.combine.
        grad_wire: format in which the gradients of the result travel in the backward pass, a dispatch: cast from the
            Buffer's dtype, and dequantized to it where they arrive.  "fp8", "fp8_token", "int8_token", "int8_group",
            "mxfp8" or "mxfp4"; None: in the Buffer's dtype.  Gradients are small: the scales of "mxfp8", "mxfp4" and
            "int8_token" follow them down, those of the others have a least value (moecomm.formats), below which "fp8"
            rounds magnitudes of less than 2.2e-10 to zero, "fp8_token" of 4.3e-9, and "int8_group" of 3.9e-13.

    Returns:
        `[T, H]` of the dtype of y; see Buffer.combine.

    Raises:
        As Buffer.combine; also BadInput for a handle that is not a moecomm.ops.Handle; Mismatch in the backward pass
        where ranks differ in `grad_wire`.
    """
    if grad_wire is not None:
        check_name("grad_wire", grad_wire, GRAD_WIRES)
    if isinstance(handle, chunks.ChunkedHandle):
        how: dict[str, Any] = {"weighted": weighted, "wire": wire, "grad_wire": grad_wire}
        y, owner = as_tensor("y", y)[0], names.find(handle.buffer)
        return several_rounds(owner, lambda: chunks.combine(y, handle, partial(combine, **how)))
    _check_handle(handle)
    check_flag("weighted", weighted)
    row_weights = handle.row_weights if weighted else None
    plain = y is not None and are_plain(y, handle.memory, row_weights, handle.graph)
    run = rounds.combine.plainly if plain else rounds.combine
    if not plain:
        y = as_tensor("y", y)[0]
    named = None if wire is None else _wire_of(wire, y)
    if not plain:
        check_same_device(y=y, handle=handle.memory, row_weights=row_weights, graph=handle.graph)
        tangents.refuse("moecomm.ops.combine", y, row_weights)
    out: torch.Tensor = run(
        y,
        row_weights,
        handle.memory,
        handle.buffer,
        handle.layout,
        handle.max_rows,
        handle.num_tokens,
        named,
        handle.zero_padding,
        handle.num_sms,
        handle.graph,
        rounds.wanted_gradients(y, row_weights, handle.graph) is not Gradients.NONE,
        handle.layer,
        grad_wire,
    )
    return out


@counted("buffer", 0, rounds=2)
def moe(
    buffer: Buffer | str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: torch.Tensor | tuple[torch.Tensor, ...],
    w2: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: Activation = "swiglu",
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    interleaved: bool = False,
    bias: torch.Tensor | None = None,
    max_rows: int | None = None,
    wire: CombineWire | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
    fused: bool | None = None,
    overflow: Overflow | None = None,
    balance: Balance | None = None,
    dropped: torch.Tensor | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Run an expert layer like Buffer.moe, with the same bits.  Collective.

    Gradients: x, topk_weights, w13, w2, w13_bias, w2_bias, bias.

    The backward pass keeps the inputs only and recomputes the rest, in three rounds: it dispatches x and the gradient,
    and combines gradients of rows.  It uses torch's grouped GEMMs in the Buffer's dtype (on GPUs bfloat16, and other
    dtypes that torch.nn.functional.grouped_mm supports) with the activation in float32, makes room for `max_rows` rows,
    goes in parts where the forward pass may, and ignores `wire`, `num_sms` and `fused`.  Gradients of the experts'
    weights and biases are those of all ranks' tokens; that of a bias `[H]` is of this rank's.

    Args:
        buffer: a Buffer, or its `name`.
        x: `[T, H]` of the Buffer's dtype.
        topk_idx: int64 or int32 `[T, K]`; -1 picks none.
        topk_weights: floating `[T, K]`, used in float32; None: every weight is 1.
        w13: `[E/R, 2 I, H]` of the Buffer's dtype.
        w2: `[E/R, H, I]`.  Weights in FP8, INT8, MXFP4 and NVFP4: tuples, as in Buffer.moe.
        w13_bias, w2_bias, activation, activation_limit, activation_alpha, interleaved: see Buffer.moe.
        bias, max_rows, wire, num_sms, check_weights, fused, dropped: see Buffer.moe.
        overflow: see Buffer.moe.  "chunks" waits in a graph of torch.compile, too, and in its backward pass.  Entries
            that "drop" drops have no gradients.
        balance: see Buffer.moe.  Weights may be parameters over tensors of ExpertWeights.  The backward pass copies
            experts anew; a slot gets the sum of its gradients and those of its copies, in the order of slots, in
            float32 and rounded once.  Those of copies are 0.  On GPUs the backward pass waits for its dispatch.
        layer: see dispatch().

    Returns:
        `[T, H]` of the dtype of x; see Buffer.moe.

    Raises:
        As Buffer.moe; also Unsupported, in the forward pass, if a gradient is required of a layer with quantized
            weights, or with `balance` beside masked ranks or in a capture.
    """
    name = _name_of(buffer)
    x, topk_idx, topk_weights, plain = _routed(x, topk_idx, topk_weights)
    gated = (activation, activation_limit, activation_alpha)
    checked_once(_check_words_of_layer, gated, interleaved, check_weights, max_rows, num_sms, layer)
    named = None if wire is None else _wire_of(wire, x)
    scales: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    plain = plain and isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor)
    plain = plain and are_plain(x, w13, w2, bias, w13_bias, w2_bias)
    if not plain:
        w13, *of_w13 = _parts(as_weights("w13", w13))
        w2, *of_w2 = _parts(as_weights("w2", w2))
        scales = (*of_w13, *of_w2)
        bias = None if bias is None else as_tensor("bias", bias)[0]
        w13_bias = None if w13_bias is None else as_tensor("w13_bias", w13_bias)[0]
        w2_bias = None if w2_bias is None else as_tensor("w2_bias", w2_bias)[0]
        check_same_device(x=x, w13=w13, w2=w2, bias=bias, w13_bias=w13_bias, w2_bias=w2_bias)
        for argument, part in zip(("w13", "w13", "w2", "w2"), scales, strict=True):
            check_same_device(x=x, **{argument: part})
        tangents.refuse("moecomm.ops.moe", x, topk_weights, w13, w2, bias, w13_bias, w2_bias)
    run = whole_layer.moe.plainly if plain else whole_layer.moe
    w13_scales, w13_factors, w2_scales, w2_factors = scales
    assert isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor)  # their values
    quantized = w13_scales is not None or w2_scales is not None
    check_overflow(overflow, max_rows)
    if balance is not None:
        check_name("balance", balance, BALANCES)
    if (count := check_dropped(overflow, dropped, x.device)) is not None:
        priorities = None if topk_weights is None else topk_weights.detach()
        topk_idx, entries = rounds.drop(topk_idx, priorities, name, "expert", 1, max_rows)
        count.copy_(entries)
        overflow = "error"  # the rest has room
    out: torch.Tensor = run(
        x,
        topk_idx,
        topk_weights,
        w13,
        w13_scales,
        w2,
        w2_scales,
        bias,
        w13_bias,
        w2_bias,
        name,
        activation,
        bool(interleaved),
        max_rows,
        named,
        num_sms,
        bool(check_weights),
        fused_or_not(fused),
        overflow,
        # Quantized weights have no backward pass.
        not quantized and rounds.wanted_gradients(x, topk_weights, w13, w2, w13_bias, w2_bias) is not Gradients.NONE,
        layer,
        activation_limit,
        activation_alpha,
        balance,
        w13_factors,
        w2_factors,
    )
    return out


def slot_weights(buffer: Buffer | str, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the weights of experts from the ranks that own them to the slots of a placement.  Collective.

    Gradients: weights.  Rank r owns experts `r * E/R` to `(r + 1) * E/R - 1` under any placement, and has their
    parameters and the state of the optimizer.  The backward pass is collective, too: the owner of an expert gets the
    sum of the gradients of its slots, in the order of slots, in float32 and rounded once.

        w13, w2 = moecomm.ops.slot_weights(buffer, [owned_w13, owned_w2])
        out = moecomm.ops.moe(buffer, x, topk_idx, topk_weights, w13, w2)

    Args:
        buffer: a Buffer with a placement, in one domain; or its `name`.
        weights: tensors `[E/R, ...]` of the experts that this rank owns, on the device of the Buffer: the same number,
            shapes `...` and dtypes on all ranks.  The first call with some shapes opens a Window, which has room for
            the slots of a rank, or the experts that it owns if these are more.

    Returns:
        A tensor `[slots, ...]` for each of them; an empty slot has zeros.  After a loss the ranks that are left own
        all experts; those of an expert without a slot are not read, and its gradients are 0.

    Raises:
        BadInput: a Buffer without a placement; weights of another number of experts, here or on the rank that it names;
            a CUDA graph is being captured, whose replays would not follow set_placement().
        Mismatch: ranks passed weights of different shapes or dtypes.
        MemoryReleased: by Buffer.release_memory().
        Unsupported: masked ranks, several domains, forward-mode AD.
        As Window and Window.barrier().

        On GPUs, only a rank that refuses its weights, or passes shapes or dtypes for the first time, raises in this
        call.  The other ranks return undefined weights.  They raise the error later, in an exchange of weights or in
        Buffer.check(), and not all in the same call.  After such an error, every rank calls check() before the next
        exchange.
    """
    name = _name_of(buffer)
    try:
        if not isinstance(weights, (list, tuple)):
            raise BadInput("weights", type(weights).__name__, "a list of tensors")
        given = [as_tensor("weights", weight)[0] for weight in weights]
    except BadInput as error:
        slots.refuse(names.find(name), error)
    found: list[torch.Tensor]
    found, _ = slots.slot_weights(given, name)
    return found


def _check_words(
    layout: Layout,
    expert_alignment: int,
    quantize: Quantize | None,
    scale_format: ScaleFormat,
    num_sms: int | None,
    zero_padding: bool,
    dequantize: bool,
    max_rows: int | None,
    overflow: Overflow | None,
    layer: int,
    grad_wire: Wire | None,
    dtype: torch.dtype,
) -> torch.dtype | None:
    """Check arguments of dispatch() other than tensors; return `grad_wire` as operators take it.  Raises BadInput."""
    check_options(Options(layout, expert_alignment, quantize, scale_format, num_sms=num_sms))
    check_flags(zero_padding=zero_padding, dequantize=dequantize)
    check_max_rows(max_rows)  # users must not pass -1, which leaves it to the Buffer
    check_overflow(overflow, max_rows)
    check_integer("layer", layer, 0, LAYERS)
    if not dequantize and quantize is None:
        want = "True, or quantize= of a format under torch.no_grad()"
        raise BadInput("dequantize", "False without quantize", want)
    return _grad_wire_of(grad_wire, dtype)


def _check_words_of_layer(gated: tuple[Any, Any, Any], interleaved: bool, check_weights: bool, *numbers: Any) -> None:
    """Check arguments of moe() other than tensors and words that depend on them.  Raises BadInput."""
    check_activation(*gated)
    check_flags(interleaved=interleaved, check_weights=check_weights)
    max_rows, num_sms, layer = numbers
    check_max_rows(max_rows)
    check_num_sms(num_sms)
    check_integer("layer", layer, 0, LAYERS)


def _waiting(name: str, overflow: Overflow | None) -> Rounds | None:
    """Return the rounds of a Buffer if the host waits for the rows of a dispatch: on CPUs, where the call waits anyway.

    None: it does not.
    """
    if torch.compiler.is_compiling():
        if overflow == "chunks":
            raise BadInput("overflow", "'chunks' in a graph", "'drop' or 'error': a graph does not wait")
        return None
    owner = names.find(name)
    return owner if overflow == "chunks" or owner.on_cpu else None


def _dispatched(arrived: chunks.Outputs, dropped: torch.Tensor | None = None) -> Dispatched:
    flat = arrived.topk_idx is not None
    return Dispatched(
        arrived.x,
        arrived.tokens_per_expert,
        arrived.num_rows,
        arrived.src,
        None if flat else arrived.weights,
        arrived.topk_idx,
        arrived.weights if flat else None,
        arrived.handle,
        dropped,
        arrived.scales,
    )


def _name_of(buffer: Buffer | str) -> str:
    if not isinstance(buffer, (Buffer, str)):
        raise BadInput("buffer", type(buffer).__name__, "a Buffer, or its .name")
    return buffer if isinstance(buffer, str) else buffer.name


def _routed(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
    """Convert tokens and routing to tensors, weights in float32; say whether they were that and are plain.

    Raises BadInput by argument name; torch's own operator errors would not name the argument.
    """
    in_float32 = topk_weights is None or getattr(topk_weights, "dtype", None) is torch.float32
    if in_float32 and x is not None and topk_idx is not None and are_plain(x, topk_idx, topk_weights):
        return x, topk_idx, topk_weights, True
    x, topk_idx = as_tensor("x", x)[0], as_tensor("topk_idx", topk_idx)[0]
    weights = None if topk_weights is None else as_tensor("topk_weights", topk_weights)[0]
    check_same_device(x=x, topk_idx=topk_idx, topk_weights=weights)
    if weights is None:
        return x, topk_idx, None, False
    if not weights.is_floating_point():
        raise BadInput("topk_weights", str(weights.dtype), "a floating dtype")
    return x, topk_idx, weights.float(), False


def _wire_of(wire: CombineWire | None, y: torch.Tensor) -> str | None:
    """Return `wire` as operators take it: see rounds.wire_named().  The round checks which dtype.

    Raises BadInput for no word or dtype.
    """
    if is_unsummed(wire):
        return "rows"
    found = _dtype_of_wire("wire", wire, "None, 'exact', 'rows', 'fp8', 'int8'", y.dtype)
    return None if found is None else str(found).removeprefix("torch.")


def _dtype_of_wire(argument: str, wire: Any, words: str, dtype: torch.dtype) -> torch.dtype | None:
    found = dtype_of_wire(wire)
    if found is not None and not isinstance(found, torch.dtype):
        raise BadInput(argument, wire, f"{words} or the dtype of y, {dtype}")
    return found


def _grad_wire_of(grad_wire: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Return `grad_wire` of a dispatch as operators take it, checked here: the backward pass is late for an error."""
    try:
        found = _dtype_of_wire("grad_wire", grad_wire, "None, 'exact', 'fp8', 'int8'", dtype)
        combine_options.check_options(combine_options.Options(wire=found), dtype)
    except BadInput as error:
        raise BadInput("grad_wire", error.got, error.want) from None
    return found


def _global_scale_of(scale: float | torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Return the scale as a tensor, which an operator takes.  The round checks its shape and dtype."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        check_same_device(x=x, x_global_scale=scale)
        return scale.detach()
    about = torch.finfo(torch.float32)
    check_real("x_global_scale", scale, about.tiny, about.max)
    return x.new_full((1,), float(scale), dtype=torch.float32)


def _check_handle(handle: Handle) -> None:
    """Raise BadInput for other handles, such as those of Buffer.dispatch, and for fields that no dispatch returns."""
    want = "the .handle of what moecomm.ops.dispatch returned"
    if not isinstance(handle, Handle):
        raise BadInput("handle", "one of Buffer.dispatch" if hasattr(handle, "rounds") else type(handle).__name__, want)
    if torch.compiler.is_compiling():
        return
    if not all(map(isinstance, handle, _FIELDS)):
        fields = zip(handle._fields, handle, _FIELDS, strict=True)
        name, value = next((name, value) for name, value, kinds in fields if not isinstance(value, kinds))
        raise BadInput("handle", f"one whose {name} is of type {type(value).__name__}", want)
    graph = handle.graph
    if graph is not None and (graph.shape != (0,) or graph.dtype != names.find(handle.buffer).dtype):
        raise BadInput("handle", f"one whose graph is {graph.dtype} {tuple(graph.shape)}", want)


def _parts(weights: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return values, scales and factors; None: there are none."""
    return (*weights, None)[:3] if isinstance(weights, tuple) else (weights, None, None)
